"""Core attention through torch's scaled_dot_product_attention: for CPU, and wherever transformer-engine is missing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402


@dataclass
class PackedRows(PackedSeqParams):
    """megatron-core's description of packed sequences, with the lengths on the host too: no layer waits for them."""

    lengths: tuple[int, ...] = ()


def packed_rows(lengths: tuple[int, ...], device: torch.device) -> PackedRows:
    """Of whole sequences, before context parallelism cuts them."""
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
    return PackedRows(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends,
        max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths), lengths=lengths,
    )


class SDPACoreAttention(MegatronModule):
    """Causal grouped-query attention; key and value heads are shared, not repeated.

    Padded: [T, B, heads, head_dim]. Rows are right-padded, so causality alone keeps padding out of every valid
    position. An attention mask, if one is given, marks padded keys ([B, 1, 1, T] or [B, 1, T, T], True = hidden).
    Packed: [T, heads, head_dim], and every sequence of `packed_seq_params` is attended to by itself, so the work is the
    sum of squares, not the square of the sum.

    Context parallelism gathers keys and values (a step towards running everything, not a fast one: transformer-engine
    passes them round); this rank's queries are chunks r and 2 x cp - 1 - r of every sequence
    (see batching.kept_positions).

    Raises:
        ValueError: an attention bias, or an attention mask beside packing or context parallelism.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None, attention_bias: Any = None, packed_seq_params: PackedRows | None = None,
    ) -> torch.Tensor:
        """Context [T, B, heads * head_dim], or [T, heads * head_dim] when packed."""
        packed = packed_seq_params is not None
        if attention_bias is not None or (attention_mask is not None and (packed or self.cp_group is not None)):
            raise ValueError("SDPACoreAttention takes no attention bias, and no mask for packed or context-parallel "
                             "sequences; pad on the right instead")
        lengths = [query.shape[0]]  # of the sequences, as far as this rank holds them
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            cp = 1 if self.cp_group is None else self.cp_group.size()
            lengths = [length // cp for length in packed_seq_params.lengths]
        if self.cp_group is not None:
            parts = self._context_parallel(query, key, value, lengths)
        elif len(lengths) == 1:
            parts = [self._attend(query, key, value, self._mask(query, key, attention_mask))]
        else:
            parts = [self._attend(*rows) for rows in zip(*(x.split(lengths) for x in (query, key, value)), strict=True)]
        context = torch.cat(parts) if len(parts) > 1 else parts[0]
        context = context.reshape(*context.shape[:2], -1)
        return context.squeeze(1) if packed else context

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, B, heads, head_dim] each -> the same shape as the query. `allowed` None: causal from the first key."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=allowed is None, scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=q.shape[1] != k.shape[1],
        )
        return context.permute(2, 0, 1, 3)

    def _mask(
        self, query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        if attention_mask is None:
            return None
        return _causal(query.shape[0], key.shape[0], query.device) & ~attention_mask

    def _context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
    ) -> list[torch.Tensor]:
        assert self.cp_group is not None
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        keys, values = (_Gather.apply(x, self.cp_group) for x in (key, value))
        parts, first = [], 0
        for length in lengths:  # every rank holds the two chunks of a sequence at the same place
            chunk = length // 2
            early, late = slice(first, first + chunk), slice(first + chunk, first + length)
            # ranks 0, 1, ... hold the early chunks in order and the late ones in reverse order
            k, v = (torch.cat([*x[:, early], *x[:, late].flip(0)]) for x in (keys, values))
            for part, index in ((early, rank), (late, 2 * cp - 1 - rank)):
                end = (index + 1) * chunk
                allowed = _causal(chunk, end, query.device) if index else None
                parts.append(self._attend(query[part], k[:end], v[:end], allowed))
            first += length
        return parts

    def sharded_state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Nothing to save: there are no parameters."""
        return {}


def _causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[queries, keys] True where a query may look; the last query is at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class _Gather(torch.autograd.Function):
    """[T, ...] of every rank of the group -> [ranks, T, ...]; backward sums what the ranks made of this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        everyone = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(everyone.unbind()), x.contiguous(), group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [part.contiguous() for part in gradients[0].unbind()]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None
