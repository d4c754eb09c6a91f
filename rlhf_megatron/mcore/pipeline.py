"""Pipeline messages of any shape without messages about shapes.

Every stage of a replica holds the same rows and forms the same micro-batches, so it knows what will arrive: a stage
receives activations in the order in which it runs its forwards, and gradients in the order of its backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_schedule_table  # noqa: E402

Shape = tuple[int, int, int]


class KnownShapes(P2PCommunicator):
    """megatron-core's point-to-point messages; `expect` comes before every run of a schedule.

    The config must have `variable_seq_lengths`, which makes megatron-core ask for a shape before each message.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: Any) -> None:
        super().__init__(pp_group=pp_group, config=config)
        self._forward: Iterator[Shape] = iter(())
        self._backward: Iterator[Shape] = iter(())

    def expect(self, shapes: Sequence[Shape], chunks: int, group_size: int | None) -> None:
        """The shapes [T, b, H] of the hidden states of the coming micro-batches.

        Args:
            chunks: virtual stages of this stage.
            group_size: micro-batches that a chunk runs before the next chunk does, when there are several.
        """
        order = get_schedule_table(len(shapes), chunks, group_size or len(shapes))
        first, last = self.pp_group.rank() == 0, self.pp_group.rank() == self.pp_group.size() - 1
        # The first chunk of the first stage has the embedding before it, the last of the last stage the loss behind.
        self._forward = iter([shapes[micro] for micro, chunk in order if not (first and chunk == 0)])
        # Backward runs through the chunks from the last to the first, so chunk c of the table is the c-th from the end.
        self._backward = iter([shapes[micro] for micro, chunk in order if not (last and chunk == 0)])

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        nothing = (0, 0, 0)
        try:
            return (next(self._forward) if recv_prev else nothing, next(self._backward) if recv_next else nothing)
        except StopIteration:
            raise RuntimeError("the pipeline receives more messages than its schedule has micro-batches: this "
                               "megatron-core orders them in another way; revise mcore/pipeline.py for it") from None
