"""Where megatron-core's ranks keep the weights: GPTModel parameter names and shapes per rank, as placements.
Torch-free."""

from __future__ import annotations

from functools import cached_property
from math import prod

from .boxes import Box, Index, Layout, Placement
from .families import family_of
from .families.base import COLUMNS, GROUPS, REPLICATED, VOCAB, Weight
from .spec import ModelSpec, ParallelLayout, padded_vocab

NORM_NAMES = ("local", "te")


class MegatronLayout(Layout):
    """A model under a ParallelLayout.

    head: "lm", or "value" for a critic ([1, H] output_layer on the last stage, the same on every tensor rank).
    norm_names: "local" (input_layernorm.weight), or "te" (self_attention.linear_qkv.layer_norm_weight).
    Tied embeddings: the last stage holds a second copy as output_layer.weight when pp > 1; middle stages hold none.
    With virtual stages the names of chunk v begin with `chunk_name(parallel, v)`; layers count from 0 in every chunk.
    ValueError when the model cannot be split so, with every broken rule.
    """

    def __init__(self, spec: ModelSpec, parallel: ParallelLayout, head: str = "lm", norm_names: str = "local") -> None:
        if norm_names not in NORM_NAMES:
            raise ValueError(f"norm_names={norm_names!r}: one of {NORM_NAMES}")
        broken = parallel.validate(spec)
        if broken:
            raise ValueError("; ".join(broken))
        self.spec, self.parallel, self.head, self.norm_names = spec, parallel, head, norm_names
        self._family = family_of(spec.family)
        self._table = self._family.table(spec, head)
        self._held: dict[tuple[int, int], tuple[tuple[Placement, ...], dict[str, Index]]] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.parallel.ranks

    @cached_property
    def _shapes(self) -> dict[str, Index]:
        return self._family.canonical_shapes(self.spec, self.head)

    def canonical_shapes(self) -> dict[str, Index]:
        return self._shapes

    def placements(self, rank: int) -> tuple[Placement, ...]:
        return self._of(rank)[0]

    def local_shapes(self, rank: int) -> dict[str, Index]:
        return self._of(rank)[1]

    def padding(self, rank: int) -> dict[str, int]:
        placements, shapes = self._of(rank)
        missing = {name: prod(shape) for name, shape in shapes.items()
                   if name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))}
        for place in placements:
            if place.local in missing:
                missing[place.local] -= place.box.elements
        return {name: count for name, count in missing.items() if count}

    def _of(self, rank: int) -> tuple[tuple[Placement, ...], dict[str, Index]]:
        at = self.parallel.coordinates(rank)
        if (at.tp, at.pp) not in self._held:  # data- and context-parallel ranks hold the same
            self._held[at.tp, at.pp] = self._build(at.tp, at.pp)
        return self._held[at.tp, at.pp]

    def _build(self, tp: int, pp: int) -> tuple[tuple[Placement, ...], dict[str, Index]]:
        placements: list[Placement] = []
        shapes: dict[str, Index] = {}

        def add(row: Weight, prefix: str = "", layer: int | None = None) -> None:
            local = prefix + row.name(self.norm_names)
            names = tuple(p.name if layer is None else p.name.format(layer=layer) for p in row.parts)
            shape, pieces = cut_weight(row, self.parallel.tp, tp)
            shapes[local] = shape
            placements.extend(Placement(Box(names[part], start, stop), local, offset)
                              for part, start, stop, offset in pieces)

        for chunk in range(self.parallel.vpp):
            model = chunk_name(self.parallel, chunk)
            if pp == 0 and chunk == 0:
                for row in self._table.first:
                    add(row, model)
            for index, layer in enumerate(self.parallel.stage_layers(self.spec.num_layers, pp, chunk)):
                for row in self._table.layer:
                    add(row, f"{model}decoder.layers.{index}.", layer)
            if pp == self.parallel.pp - 1 and chunk == self.parallel.vpp - 1:
                for row in self._table.last:
                    # one stage and a tied head: the output layer reads the embedding, without a parameter of its own
                    if not (row.local == "output_layer.weight" and self.parallel.pp == 1 and self.spec.tied
                            and self.head == "lm"):
                        add(row, model)
        return tuple(placements), shapes

    def __str__(self) -> str:
        head = "" if self.head == "lm" else f" with a {self.head} head"
        return f"Megatron {self.parallel} of {self.spec.family}{head} on {len(self.ranks)} ranks"


def chunk_name(parallel: ParallelLayout, chunk: int) -> str:
    """What the local names of a chunk begin with: nothing, or "model0.", "model1." ... with virtual stages."""
    return "" if parallel.vpp == 1 else f"model{chunk}."


def cut_weight(row: Weight, tp: int, tp_rank: int) -> tuple[Index, list[tuple[int, Index, Index, Index]]]:
    """Tensor rank tp_rank's piece of a table row: (local shape, [(part, start, stop, offset), ...])."""
    shape = row.parts[0].shape
    zero = (0,) * len(shape)
    if row.cut == REPLICATED:
        return shape, [(0, zero, shape, zero)]
    if row.cut == COLUMNS:
        width = shape[1] // tp
        return (shape[0], width), [(0, (0, tp_rank * width), (shape[0], (tp_rank + 1) * width), zero)]
    if row.cut == VOCAB:
        rows = padded_vocab(shape[0], tp) // tp
        start, stop = tp_rank * rows, min((tp_rank + 1) * rows, shape[0])
        held = [(0, (start, *zero[1:]), (stop, *shape[1:]), zero)] if start < stop else []
        return (rows, *shape[1:]), held
    if row.cut != GROUPS:
        raise ValueError(f"{row.local}: unknown cut {row.cut!r}")
    groups = row.groups or tp
    mine = range(tp_rank * groups // tp, (tp_rank + 1) * groups // tp)
    pieces, line = [], 0
    for group in mine:
        for part, (_, whole) in enumerate(row.parts):
            rows = whole[0] // groups
            pieces.append((part, (group * rows, *zero[1:]), ((group + 1) * rows, *whole[1:]), (line, *zero[1:])))
            line += rows
    return (line, *shape[1:]), pieces
