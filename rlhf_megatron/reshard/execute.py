"""Carry out a ReshardPlan on tensors: copies on the own rank, grouped sends and receives between ranks.

A message is a run of elements in the target's dtype. Large pieces travel alone, straight from and into contiguous
memory; small or strided ones are packed, all those for one peer in one round into one message, through a staging
buffer that is reused. Sender and receiver cut messages by the same rule, and each decides for itself whether it
needs the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron import devices

from ..layouts.boxes import Index, Layout
from ..layouts.plan import Piece, ReshardPlan, Round

ALONE = 1 << 20  # bytes from which a piece is a message of its own: a message costs about what copying this does
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ReshardError(RuntimeError):
    """The tensors do not fit the plan, or the ranks do not agree; raised on every rank before anything is sent."""


@dataclass
class Figures:
    """What one execution did on this rank, in bytes (copied: within the rank; staging: peak of both buffers)."""

    received: int = 0
    sent: int = 0
    copied: int = 0
    messages: int = 0
    staging: int = 0


class Message(NamedTuple):
    peer: int
    pieces: list[Piece]
    elements: int


class Staging:
    """Reusable buffers for packing; keep one per repeated execution to allocate once."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, side: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        held = self._buffers.get(side)
        if held is None or held.numel() < elements or held.dtype != dtype or held.device != device:
            self._buffers.pop(side, None)
            held = self._buffers[side] = torch.empty(elements, dtype=dtype, device=device)
        return held

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


def execute(plan: ReshardPlan, source_tensors: Mapping[str, Tensor], target_tensors: Mapping[str, Tensor],
            group: dist.ProcessGroup | None = None, *, dtype: torch.dtype | None = None,
            staging: Staging | None = None) -> Figures:
    """Fill `target_tensors` (local names of plan.target on this rank) from `source_tensors` (of plan.source), in place.

    Collective over `group` (None: the default world; without one only local copies are possible). The plan's ranks
    are ranks of the group. A rank outside a side passes an empty dict for it. dtype: of the elements on the wire;
    None = the targets'. Storage that a target tensor shares with the same source tensor is left alone. ReshardError
    on all ranks when one rank's tensors do not fit.
    """
    run = Execution(plan, group, staging)
    run.prepare(source_tensors, target_tensors, dtype)
    for index in range(plan.num_rounds):
        run.round(index, source_tensors, target_tensors)
    return run.figures


class Execution:
    """One execution, round by round: for callers that make target tensors as they go (streaming to files)."""

    def __init__(self, plan: ReshardPlan, group: dist.ProcessGroup | None = None,
                 staging: Staging | None = None) -> None:
        self.plan, self.group, self.staging = plan, group, staging or Staging()
        self.alone = dist.is_available() and not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        nccl = not self.alone and "nccl" in dist.get_backend(group)
        self.device = devices.device() if nccl else torch.device("cpu")  # of messages
        self.rounds = plan.for_rank(self.rank).rounds
        self.figures = Figures()
        self.dtype = torch.float32  # of messages; agreed upon by `prepare`

    def prepare(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor] | None,
                dtype: torch.dtype | None = None) -> None:
        """Check tensors and agree with the other ranks on the wire dtype and on the plan. target None: made later."""
        problem = self._problem(source, target)
        if dtype is None and target:
            dtype = next(iter(target.values())).dtype
            for tensor in target.values():
                dtype = torch.promote_types(dtype, tensor.dtype)  # a mixed target loses nothing on the wire
        if dtype is not None and dtype not in DTYPES:
            problem = problem or f"dtype {dtype} cannot be sent: one of {DTYPES}"
        if self.alone:
            if problem is None and any(r.sends or r.receives for r in self.rounds):
                problem = "the plan moves weights between ranks, but torch.distributed is not initialised"
            if problem:
                raise ReshardError(problem)
            self.dtype = dtype or self.dtype
        else:
            self.dtype = self._agree(problem, dtype)

    @torch.no_grad()
    def round(self, index: int, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Carry out one round; returns when this rank's part is done."""
        now = self.rounds[index]
        works, unpack = self._post(now, source, target) if now.sends or now.receives else ([], [])
        for copy in now.copies:  # while the messages travel
            into = view(target[copy.target], copy.target_offset, copy.size)
            of = view(source[copy.source], copy.source_offset, copy.size)
            if into.data_ptr() != of.data_ptr() or into.stride() != of.stride():
                into.copy_(of)
                self.figures.copied += into.nbytes
        for work in works:
            work.wait()
        for pieces, buffer in unpack:
            for piece, flat in zip(pieces, _split(buffer, pieces), strict=True):
                view(target[piece.local], piece.offset, piece.size).copy_(flat)

    def _post(self, now: Round, source: Mapping[str, Tensor], target: Mapping[str, Tensor]
              ) -> tuple[list, list[tuple[list[Piece], Tensor]]]:
        """Start all messages -> their works, and the buffers to unpack once those are done."""
        incoming, outgoing = self._messages(now.receives), self._messages(now.sends)
        into = [self._direct(message, target) for message in incoming]
        of = [self._direct(message, source) for message in outgoing]
        inbox = self._buffers("receive", incoming, into)
        outbox = self._buffers("send", outgoing, of)
        posts: list[tuple[str, Message, Tensor]] = []
        unpack: list[tuple[list[Piece], Tensor]] = []
        for message, straight, buffer in zip(incoming, into, inbox, strict=True):
            if straight is None:
                unpack.append((message.pieces, buffer))
            posts.append(("receive", message, buffer if straight is None else straight))
        for message, straight, buffer in zip(outgoing, of, outbox, strict=True):
            if straight is None:
                for piece, flat in zip(message.pieces, _split(buffer, message.pieces), strict=True):
                    flat.copy_(view(source[piece.local], piece.offset, piece.size))  # packs and converts
            posts.append(("send", message, buffer if straight is None else straight))
        size = self.dtype.itemsize
        self.figures.received += sum(message.elements for message in incoming) * size
        self.figures.sent += sum(message.elements for message in outgoing) * size
        self.figures.messages += len(posts)
        self.figures.staging = max(self.figures.staging, self.staging.nbytes)
        order: dict[tuple[str, int], int] = {}
        operations = []
        for kind, message, tensor in posts:
            tag = order[kind, message.peer] = order.get((kind, message.peer), -1) + 1
            operations.append(dist.P2POp(dist.isend if kind == "send" else dist.irecv, tensor, group=self.group,
                                         group_peer=message.peer, tag=tag))
        return dist.batch_isend_irecv(operations), unpack

    def _messages(self, by_peer: dict[int, list[Piece]]) -> list[Message]:
        """Both sides cut alike: pieces of ALONE bytes or more by themselves, the rest together."""
        limit = ALONE // self.dtype.itemsize
        found = []
        for peer in sorted(by_peer):
            small = [piece for piece in by_peer[peer] if piece.elements < limit]
            if small:
                found.append(Message(peer, small, sum(piece.elements for piece in small)))
            found += [Message(peer, [piece], piece.elements) for piece in by_peer[peer] if piece.elements >= limit]
        return found

    def _direct(self, message: Message, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The tensor memory itself, where a message is one contiguous piece of the right dtype."""
        if len(message.pieces) != 1:
            return None
        piece = message.pieces[0]
        region = view(tensors[piece.local], piece.offset, piece.size)
        fits = region.is_contiguous() and region.dtype == self.dtype and region.device == self.device
        return region if fits else None

    def _buffers(self, side: str, messages: list[Message], straight: list[Tensor | None]
                 ) -> list[Tensor]:
        """A part of the staging memory for every message that does not go straight; no elements for one that does."""
        needed = [message.elements if region is None else 0 for message, region in zip(messages, straight, strict=True)]
        if not any(needed):
            return [torch.empty(0, dtype=self.dtype)] * len(needed)
        return list(self.staging.take(side, sum(needed), self.dtype, self.device)[:sum(needed)].split(needed))

    def _problem(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor] | None) -> str | None:
        found = check_tensors(self.plan.source, self.rank, source, "source")
        if target is None:
            return "; ".join(found) or None
        found += check_tensors(self.plan.target, self.rank, target, "target")
        if not found:
            # a region received into memory that is also read from would be sent on half new, half old
            read = {tensor.untyped_storage().data_ptr() for tensor in source.values()}
            names = {piece.local for r in self.rounds for pieces in r.receives.values() for piece in pieces}
            shared = sorted(n for n in names if target[n].untyped_storage().data_ptr() in read)
            if shared:
                found.append(f"target tensors share storage with the source but receive from other ranks: "
                             f"{', '.join(shared[:5])}; give them memory of their own")
        return "; ".join(found) or None

    def _agree(self, problem: str | None, dtype: torch.dtype | None) -> torch.dtype:
        code = -1 if dtype not in DTYPES else DTYPES.index(dtype)
        mine = torch.tensor([problem is not None, code, self.plan.fingerprint], dtype=torch.int64, device=self.device)
        all_told = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(all_told, mine, group=self.group)
        told = [each.tolist() for each in all_told]
        if problem:
            raise ReshardError(f"rank {self.rank}: {problem}")
        refused = [rank for rank, (bad, _, _) in enumerate(told) if bad]
        if refused:
            raise ReshardError(f"ranks {refused} refused their tensors (see their message); nothing was sent")
        if len({plan for _, _, plan in told}) > 1:
            raise ReshardError("the ranks hold different plans; make the plan from the same layouts everywhere")
        codes = {code for _, code, _ in told} - {-1}
        if len(codes) != 1:
            kinds = [str(DTYPES[code]) for code in sorted(codes)] or "none (no rank gave target tensors or a dtype)"
            raise ReshardError(f"the ranks' targets must have one dtype, but they have {kinds}; pass dtype=")
        return DTYPES[codes.pop()]


@torch.no_grad()
def execute_local(plan: ReshardPlan, sources: Mapping[int, Mapping[str, Tensor]],
                  targets: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Carry out a plan for all ranks in this process: {rank: local tensors} on both sides. For tools and tests.

    ReshardError when a sender's and a receiver's rounds do not match, or tensors do not fit.
    """
    found = [text for layout, side, tensors in ((plan.source, "source", sources), (plan.target, "target", targets))
             for rank in layout.ranks for text in check_tensors(layout, rank, tensors.get(rank, {}), side)]
    if found:
        raise ReshardError("; ".join(found))
    for index in range(plan.num_rounds):
        sent = {(rank, peer): pieces for rank in plan.source.ranks
                for peer, pieces in plan.for_rank(rank).rounds[index].sends.items()}
        for rank in plan.target.ranks:
            now = plan.for_rank(rank).rounds[index]
            for copy in now.copies:
                view(targets[rank][copy.target], copy.target_offset, copy.size).copy_(
                    view(sources[rank][copy.source], copy.source_offset, copy.size))
            for peer, pieces in now.receives.items():
                pairs = sent.pop((peer, rank), [])
                if [(p.tensor, p.size) for p in pairs] != [(p.tensor, p.size) for p in pieces]:
                    raise ReshardError(f"round {index}: rank {peer} sends other pieces than rank {rank} expects")
                for of, into in zip(pairs, pieces, strict=True):
                    view(targets[rank][into.local], into.offset, into.size).copy_(
                        view(sources[peer][of.local], of.offset, of.size))
        if sent:
            raise ReshardError(f"round {index}: nobody receives what is sent between ranks {sorted(sent)}")


def check_tensors(layout: Layout, rank: int, tensors: Mapping[str, Tensor], side: str) -> list[str]:
    """What does not fit between a rank's tensors and its layout: missing, unknown and misshapen names.

    A further name for a known tensor's memory (a tied head) is no fault.
    """
    shapes = layout.local_shapes(rank) if rank in layout.ranks else {}
    missing = sorted(shapes.keys() - tensors.keys())
    memory = {tensors[name].data_ptr() for name in shapes.keys() & tensors.keys()}
    unknown = sorted(name for name in tensors.keys() - shapes.keys() if tensors[name].data_ptr() not in memory)
    wrong = [f"{name} is {tuple(tensors[name].shape)}, not {shape}" for name, shape in shapes.items()
             if name in tensors and tuple(tensors[name].shape) != shape]
    return [f"{side}: {title} {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            for title, names in (("missing tensors", missing), ("tensors unknown to the layout", unknown),
                                 ("tensors of the wrong shape", wrong)) if names]


def view(tensor: Tensor, offset: Index, size: Index) -> Tensor:
    """tensor[offset : offset + size] as a view."""
    if size == tensor.shape:
        return tensor.detach()
    return tensor.detach()[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]


def _split(buffer: Tensor, pieces: list[Piece]) -> list[Tensor]:
    found, at = [], 0
    for piece in pieces:
        found.append(buffer[at:at + piece.elements].view(piece.size))
        at += piece.elements
    return found
