"""Core attention through torch's scaled_dot_product_attention: for CPU, and wherever transformer-engine is missing."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core.transformer.module import MegatronModule  # noqa: E402


class SDPACoreAttention(MegatronModule):
    """Causal grouped-query attention on [T, B, heads, head_dim]; key and value heads are shared, not repeated.

    Rows are right-padded, so causality alone keeps padding out of every valid position. An attention mask, if one is
    given, marks padded keys ([B, 1, 1, T] or [B, 1, T, T], True = hidden).

    Raises:
        ValueError: packed sequences, context parallelism or an attention bias, which this path does not do.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"cp({config.context_parallel_size}): context parallelism needs transformer-engine; set cp=1"
            )
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None, attention_bias: Any = None, packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Context [T, B, heads * head_dim]."""
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError(
                "packed sequences and attention biases are not supported by SDPACoreAttention; pad instead"
            )
        length, batch = query.shape[:2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        allowed = None
        if attention_mask is not None:
            causal = torch.ones(length, key.shape[0], dtype=torch.bool, device=query.device).tril(key.shape[0] - length)
            allowed = causal & ~attention_mask
        context = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=allowed is None, scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=q.shape[1] != k.shape[1],
        )
        return context.permute(2, 0, 1, 3).reshape(length, batch, -1)

    def sharded_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Nothing to save: there are no parameters."""
        return {}
