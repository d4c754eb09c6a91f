"""What a model family is: HF config <-> ModelSpec, and one weight table that serves both directions. Torch-free.

A table row (`Weight`) relates one Megatron parameter to the canonical tensors that it is made of, and says how tensor
parallelism cuts it. Every layout of the family, and every conversion between them, is derived from these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..boxes import Index
from ..spec import ModelSpec

EMBEDDING, LM_HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
HEADS = ("lm", "value")

# How tensor parallelism cuts a row's parameter:
REPLICATED = "replicated"  # every rank holds all of it
COLUMNS = "columns"        # the second axis in equal shares
VOCAB = "vocab"            # the first axis, padded up to a multiple of tp; padded rows have no box
GROUPS = "groups"          # the first axis in groups dealt out in order; a group holds a share of each part in turn


class Part(NamedTuple):
    """A canonical tensor ("{layer}" in its name for layer rows) and its shape."""

    name: str
    shape: Index


@dataclass(frozen=True)
class Weight:
    """One row: Megatron parameter `local` (and its name under transformer-engine modules, if it differs) = `parts`
    cut by `cut`.

    groups: for GROUPS, how many groups the first axis has in all (KV heads for linear_qkv: [q..q k v] per group); 0
    means one per rank (linear_fc1: [gate_r; up_r]).
    """

    local: str
    parts: tuple[Part, ...]
    cut: str = REPLICATED
    groups: int = 0
    te_local: str | None = None

    def name(self, norm_names: str) -> str:
        return self.te_local if norm_names == "te" and self.te_local else self.local


@dataclass(frozen=True)
class Table:
    """Rows of a whole model. `layer` rows repeat for every layer; the others sit on the first or the last stage."""

    first: tuple[Weight, ...]
    layer: tuple[Weight, ...]
    last: tuple[Weight, ...]


class ModelFamily:
    """Base of the families whose block is: norm, grouped-query attention with rope, norm, gated MLP (SiLU), all RMS
    norms."""

    model_type: str
    class_prefix: str         # of the transformers classes: LlamaForCausalLM
    qkv_bias = False
    qk_norm = False
    default_head_dim: int | None = None
    default_max_positions = 2048
    # Config keys that change results and that the Megatron model does not express: {key: the values that are harmless}
    refused: Mapping[str, tuple[Any, ...]] = {}
    COMMON_REFUSED: Mapping[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"), "attention_dropout": (0, 0.0, None), "quantization_config": (None,),
        "partial_rotary_factor": (1, 1.0, None), "rope_interleaved": (False, None), "use_sliding_window": (False, None),
    }

    def spec(self, hf_config: Mapping[str, Any]) -> ModelSpec:
        """ModelSpec of a config.json. ValueError names every key that is missing or cannot be expressed."""
        self._refuse(hf_config)
        hidden, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
        head_dim = hf_config.get("head_dim") or self.default_head_dim
        if head_dim is None and hidden % heads:
            raise ValueError(f"hidden_size({hidden}) is not a multiple of num_attention_heads({heads}) and there is no "
                             f"head_dim; correct config.json")
        theta, scaling = rope(hf_config)
        return ModelSpec(
            family=self.model_type, num_layers=hf_config["num_hidden_layers"], hidden_size=hidden,
            ffn_hidden_size=hf_config["intermediate_size"], num_heads=heads,
            num_kv_heads=hf_config.get("num_key_value_heads") or heads, head_dim=head_dim or hidden // heads,
            vocab_size=hf_config["vocab_size"],
            max_positions=hf_config.get("max_position_embeddings") or self.default_max_positions,
            norm="rms", norm_eps=float(hf_config.get("rms_norm_eps", 1e-6)), rope_theta=theta, rope_scaling=scaling,
            activation="silu", gated=True, qkv_bias=self.qkv_bias, qk_norm=self.qk_norm,
            tied=bool(hf_config.get("tie_word_embeddings", False)), hf_config=dict(hf_config))

    def hf_config(self, spec: ModelSpec, head: str = "lm") -> dict[str, Any]:
        """config.json of the spec: what the spec says, over whatever else the config it was read from said."""
        config = dict(spec.hf_config)
        config.update(
            model_type=self.model_type, num_hidden_layers=spec.num_layers, hidden_size=spec.hidden_size,
            intermediate_size=spec.ffn_hidden_size, num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads, head_dim=spec.head_dim, vocab_size=spec.vocab_size,
            max_position_embeddings=spec.max_positions, rms_norm_eps=spec.norm_eps, tie_word_embeddings=spec.tied,
            hidden_act=config.get("hidden_act", spec.activation), architectures=[self.architecture(head)])
        if "rope_parameters" in config or not ("rope_theta" in config or "rope_scaling" in config):
            plain = {"rope_type": "default", "rope_theta": spec.rope_theta}
            config["rope_parameters"] = {**plain, **(spec.rope_scaling or {})}
        else:
            config["rope_theta"] = spec.rope_theta
        if head == "value":
            # one number per token, from a head without a bias, and no dropout in front of it
            config.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, token_classification_bias=False,
                          classifier_dropout=0.0)
        return config

    def architecture(self, head: str = "lm") -> str:
        return self.class_prefix + ("ForCausalLM" if head == "lm" else "ForTokenClassification")

    def table(self, spec: ModelSpec, head: str = "lm") -> Table:
        """The weight table. head "value" has a [1, H] output and no lm_head."""
        if head not in HEADS:
            raise ValueError(f"head={head!r}: one of {HEADS}")
        hidden, vocab = spec.hidden_size, spec.vocab_size
        embedding = Part(EMBEDDING, (vocab, hidden))
        if head == "value":
            output = Weight("output_layer.weight", (Part(VALUE_HEAD, (1, hidden)),))
        else:
            output = Weight("output_layer.weight", (embedding if spec.tied else Part(LM_HEAD, (vocab, hidden)),), VOCAB)
        return Table(
            first=(Weight("embedding.word_embeddings.weight", (embedding,), VOCAB),),
            layer=self.layer_weights(spec),
            last=(Weight("decoder.final_layernorm.weight", (Part("model.norm.weight", (hidden,)),)), output))

    def layer_weights(self, spec: ModelSpec) -> tuple[Weight, ...]:
        """Rows of one layer; Megatron names start at the layer, canonical names carry "model.layers.{layer}."."""
        hidden, ffn, dim = spec.hidden_size, spec.ffn_hidden_size, spec.head_dim
        q, kv = spec.num_heads * dim, spec.num_kv_heads * dim
        attention, mlp = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."

        def norm(name: str, size: int) -> tuple[Part, ...]:
            return (Part("model.layers.{layer}." + name, (size,)),)

        rows = [
            Weight("input_layernorm.weight", norm("input_layernorm.weight", hidden),
                   te_local="self_attention.linear_qkv.layer_norm_weight"),
            Weight("self_attention.linear_qkv.weight",
                   (Part(attention + "q_proj.weight", (q, hidden)), Part(attention + "k_proj.weight", (kv, hidden)),
                    Part(attention + "v_proj.weight", (kv, hidden))), GROUPS, groups=spec.num_kv_heads)]
        if spec.qkv_bias:
            rows.append(Weight("self_attention.linear_qkv.bias",
                               (Part(attention + "q_proj.bias", (q,)), Part(attention + "k_proj.bias", (kv,)),
                                Part(attention + "v_proj.bias", (kv,))), GROUPS, groups=spec.num_kv_heads))
        if spec.qk_norm:
            rows += [Weight("self_attention.q_layernorm.weight", norm("self_attn.q_norm.weight", dim)),
                     Weight("self_attention.k_layernorm.weight", norm("self_attn.k_norm.weight", dim))]
        rows += [
            Weight("self_attention.linear_proj.weight", (Part(attention + "o_proj.weight", (hidden, q)),), COLUMNS),
            Weight("pre_mlp_layernorm.weight", norm("post_attention_layernorm.weight", hidden),
                   te_local="mlp.linear_fc1.layer_norm_weight"),
            Weight("mlp.linear_fc1.weight",
                   (Part(mlp + "gate_proj.weight", (ffn, hidden)),
                    Part(mlp + "up_proj.weight", (ffn, hidden))), GROUPS),
            Weight("mlp.linear_fc2.weight", (Part(mlp + "down_proj.weight", (hidden, ffn)),), COLUMNS)]
        return tuple(rows)

    def canonical_shapes(self, spec: ModelSpec, head: str = "lm") -> dict[str, Index]:
        """Name and shape of every published tensor, in model order."""
        table = self.table(spec, head)
        shapes: dict[str, Index] = {}
        for row in table.first:
            shapes.update(row.parts)
        for layer in range(spec.num_layers):
            for row in table.layer:
                shapes.update((part.name.format(layer=layer), part.shape) for part in row.parts)
        for row in table.last:
            shapes.update(row.parts)
        return shapes

    def _refuse(self, hf_config: Mapping[str, Any]) -> None:
        found = [f"{key} is missing" for key in ("hidden_size", "intermediate_size", "num_hidden_layers",
                                                 "num_attention_heads", "vocab_size") if key not in hf_config]
        for key, harmless in {**self.COMMON_REFUSED, **self.refused}.items():
            if key in hf_config and hf_config[key] not in harmless:
                found.append(f"{key}={hf_config[key]!r} is not supported (only {', '.join(map(repr, harmless))})")
        kinds = set(hf_config.get("layer_types") or ()) - {"full_attention"}
        if kinds:
            found.append(f"layer_types {sorted(kinds)} are not supported (only 'full_attention')")
        if found:
            raise ValueError(f"{self.model_type} config: " + "; ".join(found)
                             + ". The Megatron model would compute something else; use a checkpoint without it")


def rope(hf_config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`. None = plain
    rope."""
    parameters = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ValueError(f"rope parameters differ by layer type ({sorted(parameters)}): not supported")
    theta = float(parameters.pop("rope_theta", None) or hf_config.get("rope_theta") or 10000.0)
    if parameters.pop("partial_rotary_factor", 1.0) not in (1, 1.0, None):
        raise ValueError("partial_rotary_factor below 1 is not supported: rope must cover the whole head")
    kind = parameters.pop("type", None)
    kind = parameters.pop("rope_type", None) or kind or "default"
    if kind == "default":
        return theta, None
    needed = {"linear": {"factor"}, "llama3": {"factor", "low_freq_factor", "high_freq_factor",
                                               "original_max_position_embeddings"}}.get(kind)
    if needed is None:
        raise ValueError(f"rope_type={kind!r} is not supported (only 'default', 'linear', 'llama3')")
    if kind == "llama3":  # transformers' rule when the key is absent
        parameters.setdefault("original_max_position_embeddings", hf_config.get("max_position_embeddings"))
    missing = sorted(name for name in needed if parameters.get(name) is None)
    if missing:
        raise ValueError(f"rope_type={kind!r} needs {missing}; add to config.json")
    return theta, {"rope_type": kind, **{name: parameters[name] for name in sorted(needed)}}
