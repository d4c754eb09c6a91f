"""What a model is (ModelSpec) and how a role's ranks share it (ParallelLayout). Torch-free, frozen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

AXES = ("tp", "cp", "dp", "pp")  # fastest coordinate first: the order in which coordinates lie on the ranks


@dataclass(frozen=True)
class ModelSpec:
    """What a family's HF config means. Sizes are global (before any split) and in elements.

    `rope_scaling` is HF's dict (with "rope_type") or None for plain rope; `hf_config` is the config as read, kept so
    that an export can write back every key that this class does not express.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm: str = "rms"
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    hf_config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "head_dim",
                     "vocab_size", "max_positions"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"model {name}={value!r}: must be an integer of at least 1; correct the HF config")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model num_heads({self.num_heads}) is not a multiple of num_kv_heads"
                             f"({self.num_kv_heads}); correct the HF config")

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class Coordinates(NamedTuple):
    tp: int
    pp: int
    cp: int
    dp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees tp, pp, cp, dp laid over `ranks` (tp fastest, then cp, dp; pp slowest). No ranks given: 0..size-1.

    vpp: virtual stages of every pipeline stage. Virtual stage v * pp + p, in the order of depth, is chunk v of stage p.
    layers: layers of every virtual stage, in the order of depth; empty: equal shares.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ranks: tuple[int, ...] = ()
    vpp: int = 1
    layers: tuple[int, ...] = ()
    _index: dict[int, int] = field(init=False, repr=False, compare=False)  # rank -> position in `ranks`

    def __post_init__(self) -> None:
        for axis in (*AXES, "vpp"):
            value = getattr(self, axis)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{axis}={value!r}: a parallel degree must be an integer of at least 1")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp({self.vpp}) splits pipeline stages, but pp is 1; set vpp to 1, or pp to 2 or more")
        object.__setattr__(self, "layers", tuple(self.layers))
        if self.layers and len(self.layers) != self.pp * self.vpp:
            raise ValueError(f"layers {list(self.layers)} names {len(self.layers)} stages, but pp({self.pp}) x vpp"
                             f"({self.vpp}) = {self.pp * self.vpp}; give one number of layers for each")
        if any(count < 1 for count in self.layers):
            raise ValueError(f"layers {list(self.layers)}: every stage needs at least one layer")
        size = self.tp * self.pp * self.cp * self.dp
        object.__setattr__(self, "ranks", tuple(self.ranks) or tuple(range(size)))
        if len(self.ranks) != size:
            raise ValueError(f"tp({self.tp}) x pp({self.pp}) x cp({self.cp}) x dp({self.dp}) = {size} but "
                             f"{len(self.ranks)} ranks are given; change a degree or the number of ranks")
        if len(set(self.ranks)) != size:
            raise ValueError(f"ranks {self.ranks} hold a rank twice; every rank may appear once")
        object.__setattr__(self, "_index", {rank: i for i, rank in enumerate(self.ranks)})

    @classmethod
    def build(cls, size_or_ranks: int | Iterable[int], tp: int = 1, pp: int = 1, cp: int = 1, vpp: int = 1,
              layers: Iterable[int] = ()) -> ParallelLayout:
        """Derive dp from the number of ranks. ValueError when tp x pp x cp does not divide it."""
        ranks = tuple(range(size_or_ranks)) if isinstance(size_or_ranks, int) else tuple(size_or_ranks)
        block = tp * pp * cp
        if block < 1 or not ranks or len(ranks) % block:
            raise ValueError(f"tp({tp}) x pp({pp}) x cp({cp}) = {block} does not divide the number of ranks"
                             f"({len(ranks)}); change a degree or the number of ranks")
        return cls(tp=tp, pp=pp, cp=cp, dp=len(ranks) // block, ranks=ranks, vpp=vpp, layers=tuple(layers))

    @property
    def size(self) -> int:
        return len(self.ranks)

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a rank; KeyError-free: ValueError names a rank that is not in the layout."""
        index = self._index.get(rank)
        if index is None:
            raise ValueError(f"rank {rank} is not among the layout's ranks {self.ranks}")
        index, tp = divmod(index, self.tp)
        index, cp = divmod(index, self.cp)
        pp, dp = divmod(index, self.dp)
        return Coordinates(tp=tp, pp=pp, cp=cp, dp=dp)

    def rank_of(self, tp: int = 0, pp: int = 0, cp: int = 0, dp: int = 0) -> int:
        for axis, value in (("tp", tp), ("pp", pp), ("cp", cp), ("dp", dp)):
            if not 0 <= value < getattr(self, axis):
                raise ValueError(f"coordinate {axis}={value} is outside 0..{getattr(self, axis) - 1}")
        return self.ranks[tp + self.tp * (cp + self.cp * (dp + self.dp * pp))]

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only in `axes`, each in the layout's order. groups("tp", "pp") = replicas."""
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            raise ValueError(f"unknown axis {unknown[0]!r}: one of {AXES}")
        inner = [axis for axis in AXES if axis in axes]
        outer = [axis for axis in AXES if axis not in axes]

        def walk(names: Sequence[str]) -> Iterable[dict[str, int]]:
            # itertools.product varies its last range fastest, so the slowest axis goes first
            slow_first = list(reversed(names))
            for values in product(*(range(getattr(self, axis)) for axis in slow_first)):
                yield dict(zip(slow_first, values, strict=True))

        return [tuple(self.rank_of(**fixed, **moving) for moving in walk(inner)) for fixed in walk(outer)]

    def stage_layers(self, num_layers: int, pp_rank: int, chunk: int = 0) -> range:
        """Global indices of the layers of one pipeline stage, or of one chunk of it with vpp above 1."""
        broken = self._broken_stages(num_layers)
        if broken:
            raise ValueError(broken)
        if not 0 <= pp_rank < self.pp:
            raise ValueError(f"pipeline stage {pp_rank} is outside 0..{self.pp - 1}")
        if not 0 <= chunk < self.vpp:
            raise ValueError(f"chunk {chunk} of a pipeline stage is outside 0..{self.vpp - 1}")
        stages = self.pp * self.vpp
        counts = self.layers or (num_layers // stages,) * stages
        stage = chunk * self.pp + pp_rank
        first = sum(counts[:stage])
        return range(first, first + counts[stage])

    def _broken_stages(self, num_layers: int) -> str | None:
        stages = self.pp * self.vpp
        if self.layers and sum(self.layers) != num_layers:
            return (f"layers {list(self.layers)} sum to {sum(self.layers)}, but the model has num_layers({num_layers})"
                    "; change a stage")
        if self.layers or not num_layers % stages:
            return None
        product = f"pp({self.pp})" if self.vpp == 1 else f"pp({self.pp}) x vpp({self.vpp}) = {stages}"
        legal = [n for n in range(1, num_layers + 1) if not num_layers % n]
        what = "pp" if self.vpp == 1 else "pp x vpp"
        return (f"num_layers({num_layers}) is not a multiple of {product}; legal {what} for this model: {legal}, or "
                "give every stage's number in layers")

    def validate(self, spec: ModelSpec) -> list[str]:
        """Every rule that this layout breaks for the model, each with its numbers and the remedy; empty = fits."""
        found = []
        for what, value in (("num_heads", spec.num_heads), ("num_kv_heads", spec.num_kv_heads),
                            ("ffn_hidden_size", spec.ffn_hidden_size)):
            if value % self.tp:
                legal = [t for t in range(1, spec.num_kv_heads + 1)
                         if not (spec.num_heads % t or spec.num_kv_heads % t or spec.ffn_hidden_size % t)]
                found.append(f"{what}({value}) is not a multiple of tp({self.tp}); legal tp for this model: {legal}")
        broken = self._broken_stages(spec.num_layers)
        if broken:
            found.append(broken)
        return found

    def __str__(self) -> str:
        virtual = f" VPP{self.vpp}" if self.vpp > 1 else ""
        return f"TP{self.tp} PP{self.pp}{virtual} CP{self.cp} DP{self.dp}"


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Rows of Megatron's vocabulary: the smallest multiple of tp that holds vocab_size. The padded rows have no box."""
    return -(-vocab_size // tp) * tp
