"""ModelSpec -> a Megatron model of this rank, whose forward ends at the hidden states.

The head is applied by the engine, on response positions only: logits of prompts and padding never exist.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from rlhf_megatron import devices
from rlhf_megatron.layouts.spec import ModelSpec, ParallelLayout, padded_vocab
from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402

from rlhf_megatron.mcore.attention import SDPACoreAttention  # noqa: E402
from rlhf_megatron.mcore.norms import RMSNorm  # noqa: E402

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

try:
    import transformer_engine  # noqa: F401

    HAVE_TE = True
except ImportError:
    HAVE_TE = False


def uses_transformer_engine() -> bool:
    """Whether models are built from transformer-engine's layers: with CUDA and the package. Not run yet."""
    return HAVE_TE and devices.is_cuda()


def norm_names() -> str:
    """MegatronLayout's `norm_names` for the models that `build_model` makes here."""
    return "te" if uses_transformer_engine() else "local"


def transformer_config(
    spec: ModelSpec, layout: ParallelLayout, dtype: torch.dtype, sequence_parallel: bool = False,
    recompute: str = "none", deterministic: bool = False,
) -> TransformerConfig:
    """megatron-core's config. Fusions are off without transformer-engine: they would compile on the first step."""
    if spec.norm != "rms" or spec.activation != "silu" or not spec.gated:
        raise ValueError(
            f"{spec.family}: norm {spec.norm!r}, activation {spec.activation!r}, gated {spec.gated} cannot be built "
            "yet; supported are RMS norms with a gated SiLU MLP"
        )
    if sequence_parallel and layout.tp == 1:
        raise ValueError("sequence_parallel needs tp above 1: it splits sequences over the tensor-parallel ranks")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r}: one of {', '.join(RECOMPUTE)}")
    fused = uses_transformer_engine()
    pipeline: dict[str, Any] = {}
    if layout.pp > 1:
        pipeline = {
            "pipeline_model_parallel_layout": _stages(spec, layout),
            # megatron-core asks for the shape of every message, and pipeline.KnownShapes answers; its check of this
            # wants a dispatcher of experts named even where there are none.
            "variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall",
            # Interleaved chunks with batched messages wait for each other in another order on gloo, silently.
            "batch_p2p_comm": layout.vpp == 1, "overlap_p2p_comm": layout.vpp > 1,
            "batch_p2p_sync": False,  # guards against a race of batched messages in torch before 2.0
        }
    return TransformerConfig(
        num_layers=spec.num_layers, hidden_size=spec.hidden_size, ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_heads, num_query_groups=spec.num_kv_heads, kv_channels=spec.head_dim,
        normalization="RMSNorm", layernorm_epsilon=spec.norm_eps, qk_layernorm=spec.qk_norm,
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, add_qkv_bias=spec.qkv_bias,
        hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, context_parallel_size=layout.cp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        sequence_parallel=sequence_parallel, **pipeline, **RECOMPUTE[recompute],
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        # All weights are loaded, so drawing them would be slow and mean nothing. Initialisation as such stays on: it
        # also tags parameters as tensor-parallel, and the gradient norm counts only the first rank's share of those
        # without the tag.
        use_cpu_initialization=not devices.is_cuda(), init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_, embedding_init_method=torch.nn.init.zeros_,
        calculate_per_token_loss=True, attention_softmax_in_fp32=True,
        bias_activation_fusion=fused, bias_dropout_fusion=fused, apply_rope_fusion=fused, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, deterministic_mode=deterministic,
    )


def _stages(spec: ModelSpec, layout: ParallelLayout) -> list[list[str]]:
    """What every virtual stage holds, in the order of depth, in megatron-core's words."""
    stages = [["decoder"] * len(layout.stage_layers(spec.num_layers, stage, chunk))
              for chunk in range(layout.vpp) for stage in range(layout.pp)]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def build_model(
    spec: ModelSpec, layout: ParallelLayout, groups: ProcessGroupCollection, dtype: torch.dtype, head: str = "lm",
    trainable: bool = True, sequence_parallel: bool = False, recompute: str = "none", deterministic: bool = False,
) -> list[HiddenStatesModel]:
    """This rank's part of the model, on the device: one chunk for each of its virtual stages.

    Weights are zero, and norms one, until they are loaded. Call inside `groups.use`. head "value": no logits layer;
    `output_layer.weight` [1, H] is the value head, starting at 0.
    """
    broken = layout.validate(spec)
    if broken:
        raise ValueError("; ".join(broken))
    config = transformer_config(spec, layout, dtype, sequence_parallel, recompute, deterministic)
    chunks = []
    for chunk in range(layout.vpp):
        model = HiddenStatesModel(spec, config, layout, groups, head, chunk)
        model.requires_grad_(trainable)
        chunks.append(model.to(devices.device()))
    return chunks


class HiddenStatesModel(GPTModel):
    """GPTModel whose last stage returns the final hidden states [T, B, H] (after the final norm) instead of logits."""

    def __init__(
        self, spec: ModelSpec, config: TransformerConfig, layout: ParallelLayout, groups: ProcessGroupCollection,
        head: str, chunk: int = 0,
    ) -> None:
        stage = groups.pp.rank()
        value = head == "value"
        layers = len(layout.stage_layers(spec.num_layers, stage, chunk))
        super().__init__(
            config=config, transformer_layer_spec=block_spec(spec, layers),
            # A value head needs no logits layer; the smallest that divides is allocated and at once replaced.
            vocab_size=padded_vocab(spec.vocab_size, layout.tp), max_sequence_length=spec.max_positions,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == layout.pp - 1 and chunk == layout.vpp - 1, parallel_output=True,
            share_embeddings_and_output_weights=spec.tied and not value,
            position_embedding_type="rope", rotary_base=spec.rope_theta, pg_collection=groups,
            vp_stage=chunk if layout.vpp > 1 else None,
        )
        self.rotary_pos_emb.inv_freq = inverse_frequencies(spec).to(self.rotary_pos_emb.inv_freq.device)
        if value and self.post_process:
            self.output_layer = ValueHead(config, groups.tp)

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if not self.config.sequence_parallel or not self.post_process:
            return hidden_states  # an earlier stage sends on what it has
        # Heads give every rank the whole gradient of the hidden states: backward keeps this rank's part, without a sum.
        return gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )


class ValueHead(torch.nn.Module):
    """The weight [1, H] of a critic's head, the same on every tensor-parallel rank, which all see all positions."""

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        group = (metadata or {}).get("dp_cp_group")
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=group
        )


def block_spec(spec: ModelSpec, layers: int) -> TransformerBlockSubmodules:
    """Layer specs of one stage."""
    if uses_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        fused = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm)
        return TransformerBlockSubmodules(layer_specs=[fused] * layers, layer_norm=TENorm)
    layer: ModuleSpec = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """[head_dim / 2] fp32 rotation speeds. Su et al. 2021, https://arxiv.org/abs/2104.09864.

    "linear" scaling divides all by the factor (Chen et al. 2023, https://arxiv.org/abs/2306.15595); "llama3" divides
    the slow ones, keeps the fast ones and blends between (Llama 3.1's published reference code).
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return plain / factor
    low, high, old = (scaling[k] for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > old / low, plain / factor, plain)
    smooth = (old / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= old / high) & (wavelength <= old / low)
    return torch.where(medium, blended, scaled)
