"""A Megatron model that scores and learns: one replica's rows in, log-probs, values or metrics out.

Nothing in here divides a loss or a gradient: the loss of a micro-batch is already its share of the mini-batch's, so the
sum over micro-batches and data-parallel replicas is the mini-batch's gradient whatever the split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from rlhf_megatron import devices
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.layouts.flops import forward_flops
from rlhf_megatron.layouts.mcore import chunk_name
from rlhf_megatron.layouts.spec import ModelSpec, ParallelLayout
from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402

from rlhf_megatron.mcore import checkpoint, groups  # noqa: E402
from rlhf_megatron.mcore import optimizer as optimizers  # noqa: E402
from rlhf_megatron.mcore.attention import packed_rows  # noqa: E402
from rlhf_megatron.mcore.batching import Batcher, Cut, MicroBatch  # noqa: E402
from rlhf_megatron.mcore.context_parallel import whole  # noqa: E402
from rlhf_megatron.mcore.logprobs import vocab_parallel_log_probs  # noqa: E402
from rlhf_megatron.mcore.model import HiddenStatesModel, build_model  # noqa: E402
from rlhf_megatron.mcore.offload import Storages, needs  # noqa: E402
from rlhf_megatron.mcore.pipeline import KnownShapes  # noqa: E402
from rlhf_megatron.observe.metrics import Mean, Metric, Sum, merge  # noqa: E402

HEADS = ("lm", "value")


class Loss(Protocol):
    """What train_step takes: loss(outputs, fields, meta) -> (scalar, metrics), all [b, R]; `reads` names the fields."""

    reads: tuple[str, ...]

    def __call__(
        self, outputs: Mapping[str, torch.Tensor], fields: Mapping[str, torch.Tensor], meta: Mapping[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Metric]]: ...


class MegatronEngine:
    """One rank's part of one role's model. Every method is collective over the role's ranks, in the same order.

    Args:
        spec, layout: the model, and how the ranks share it. The layout holds this rank and all ranks of the pool.
        head: "lm" (log-probs) or "value" (values).
        trainable: False builds no gradient buffers and no optimizer.
        dtype: "float32" or "bfloat16" (then with fp32 gradients and fp32 master weights).
        micro_batch_size: rows per forward on this replica, if micro_batch_tokens is 0.
        micro_batch_tokens: tokens per forward on this replica, never more; rows are spread so that all is balanced.
        packing: rows of a micro-batch lie one behind the other, without padding.
        sequence_parallel: norms and residuals are split over the tensor-parallel ranks, too (needs tp above 1).
        recompute: activations that are made anew in backward: "none", "selective" (core attention) or "full" (layers).
        overlap: gradients are reduced while backward runs, and with a distributed optimizer parameters are gathered
            while forward does.
        deterministic: only kernels that give the same bits every time.
        optimizer: settings as in the config section `optimizer`; needed when trainable.
        total_steps: optimizer updates of the whole run, over which a falling learning rate falls.
        seed: of the initial weights and of this role's random streams.

    `keep_gradients = True` makes train_step keep a copy of the summed gradients before clipping, for `gradients()`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: ParallelLayout,
        *,
        head: str = "lm",
        trainable: bool = True,
        dtype: str = "float32",
        micro_batch_size: int = 1,
        micro_batch_tokens: int = 0,
        packing: bool = False,
        sequence_parallel: bool = False,
        recompute: str = "none",
        overlap: bool = False,
        deterministic: bool = False,
        optimizer: Any | None = None,
        total_steps: int = 1,
        seed: int = 1,
    ) -> None:
        if head not in HEADS:
            raise ValueError(f"head={head!r}: one of {', '.join(HEADS)}")
        if trainable and optimizer is None:
            raise ValueError("a trainable engine needs optimizer settings; pass optimizer=, or trainable=False")
        self.spec, self.layout, self.head = spec, layout, head
        self.settings, self.total_steps = optimizer, total_steps
        self.dtype, self.seed = devices.dtype(dtype), seed
        self.sequence_parallel, self.recompute = sequence_parallel, recompute
        self.overlap, self.deterministic = overlap and trainable, deterministic
        self.step = 0  # optimizer updates made; skipped ones do not count
        self.skipped_steps = 0
        self.keep_gradients = False
        self._gradients: dict[str, torch.Tensor] | None = None
        self.groups = groups.build_groups(layout, seed)
        self.coordinates = layout.coordinates(torch.distributed.get_rank())
        self.is_output = self.coordinates.pp == layout.pp - 1 and self.coordinates.tp == self.coordinates.cp == 0
        flops = forward_flops(spec, head)
        self.cut = Cut(
            rows=micro_batch_size, tokens=micro_batch_tokens, packed=packing, cp=layout.cp, cp_rank=self.coordinates.cp,
            sequence_parallel=layout.tp if sequence_parallel else 1,
            linear=flops.per_token, quadratic=flops.per_token_squared,
        )
        with self._entered():
            self._build(trainable)
        self.storages = Storages(self)

    # ---- weights ----

    @needs("parameters")
    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters under their MegatronLayout names: the storage that is trained, not copies.

        With `overlap`, what other replicas updated arrives with the next forward, or with the next call of this.
        """
        self._gather_parameters()
        return {name: parameter.detach() for name, parameter in self._named_parameters()}

    @needs("parameters", "optimizer")
    def weights_loaded(self) -> None:
        """Call after writing into `tensors()`: the fp32 master weights are set from the model's."""
        if self.optimizer is not None:
            with self._entered():
                self.optimizer.reload_model_params()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the last train_step, by local name: summed over replicas and micro-batches, not clipped."""
        if self._gradients is None:
            raise RuntimeError("no gradients were kept: set keep_gradients = True before train_step")
        return self._gradients

    # ---- scoring ----

    @needs("parameters")
    def forward(self, batch: DataProto, temperature: float = 1.0, entropy: bool = False) -> DataProto | None:
        """Score this replica's rows without learning.

        Returns, on the replica's output rank (tp 0, last stage), `log_probs` (and `entropy`), or `values` for a value
        head: fp32, ragged over the response, in the order of the rows. None on the other ranks.
        """
        batcher = self._batcher(batch)
        with self._entered(), torch.no_grad():
            self._train_mode(False)
            parts = self._schedule(
                batcher, lambda micro, hidden: (micro.places, self._head(micro, hidden, temperature, entropy)),
                forward_only=True,
            )
            self._train_mode(True)
        if not self.is_output:
            return None
        return DataProto(tensors={
            name: batcher.ragged([(places, out[name]) for places, out in parts]) for name in parts[0][1]
        })

    # ---- learning ----

    @needs("parameters", "gradients", "optimizer")
    def train_step(
        self, batch: DataProto, loss: Loss, temperature: float = 1.0, entropy: bool = False
    ) -> dict[str, Metric]:
        """One optimizer update on this replica's rows; every replica takes part, be all its rows masked.

        The loss sees `outputs` (log_probs and, if asked, entropy; or values) and the fields that it reads, as [b, R]
        per micro-batch, and batch.meta; fields always hold `response_mask`, and outputs are 0 where it is False. Its
        scalar must already be divided by the mini-batch's denominator.

        Returns the loss's metrics (last stage only), `grad_norm` before clipping, `lr`, and `skipped`. An update is
        skipped, with weights, optimizer state and learning rate left as they are on all ranks, when a gradient is not
        finite or when meta["denominator"] is 0 (no valid token in the mini-batch).
        """
        if self.optimizer is None or self.settings is None:
            raise RuntimeError("this engine was built with trainable=False: it has no optimizer to make an update with")
        if batch.meta.get("denominator") == 0:
            return self._report([], applied=False)
        batcher = self._batcher(batch, reads=loss.reads, valid_only=True)
        with self._entered():
            for chunk in self.ddp:
                chunk.zero_grad_buffer()
                chunk.force_all_reduce = self.keep_gradients  # asked when an overlapped reduction starts in backward
            self.optimizer.zero_grad()
            self._train_mode(True)
            reports = self._schedule(
                batcher, partial(self._micro_loss, loss, dict(batch.meta), temperature, entropy), forward_only=False
            )
            rate = optimizers.learning_rate(self.settings, self.step, self.total_steps)
            optimizers.apply_settings(self.optimizer, self.settings, rate)
            norm, applied = optimizers.update(self.optimizer, self.settings.clip_grad)
            self._gather_pending = self._overlaps_gather
        return self._report(reports, applied, norm, rate)

    # ---- checkpoints ----

    @needs("parameters", "optimizer")
    def save(self, directory: str | Path) -> None:
        """Write model, optimizer, counters and random streams. Collective over the pool."""
        self._gather_parameters()
        checkpoint.save(self, directory)

    @needs("parameters", "optimizer")
    def load(self, directory: str | Path) -> None:
        """Load what `save` wrote, also under another parallel layout. Collective over the pool."""
        checkpoint.load(self, directory)

    # ---- memory ----

    def resident_bytes(self) -> dict[str, int]:
        """Bytes on the device now, by part: parameters, gradients, optimizer."""
        return self.storages.resident_bytes()

    def offload(self, *parts: str) -> None:
        """Free the device memory of these parts; every method brings back what it needs. Not collective.

        What `tensors()` gave before must not be touched until `reload("parameters")`, and is valid again after it.
        """
        self.storages.offload(*parts)

    def reload(self, *parts: str) -> None:
        """Bring these parts back into the storages that they had. Not collective."""
        self.storages.reload(*parts)

    # ---- inside ----

    def _entered(self) -> Any:
        return groups.use(self.groups, self.layout)

    def _build(self, trainable: bool) -> None:
        self.chunks = build_model(
            self.spec, self.layout, self.groups, self.dtype, head=self.head, trainable=trainable,
            sequence_parallel=self.sequence_parallel, recompute=self.recompute, deterministic=self.deterministic,
        )
        config = self.model.config
        config.calculate_per_token_loss = True  # DDP then sums over replicas and the schedule does not divide
        config.finalize_model_grads_func = self._finalize
        self._overlaps_gather = self.overlap and optimizers.is_distributed(self.settings)
        self.ddp: list[Any] = list(self.chunks)
        self.optimizer = None
        if trainable:
            how = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=optimizers.is_distributed(self.settings),
                overlap_grad_reduce=self.overlap, overlap_param_gather=self._overlaps_gather,
            )
            # A later chunk runs first in backward: only the first chunk's reductions have nothing to hide behind.
            self.ddp = [DistributedDataParallel(config, how, chunk, disable_bucketing=index > 0,
                                                pg_collection=self.groups)
                        for index, chunk in enumerate(self.chunks)]
            if self.overlap:
                pauses = [chunk.no_sync for chunk in self.ddp]
                config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
            self.optimizer = optimizers.build_optimizer(self.settings, self.ddp, self.groups, self.dtype)
        self._gather_pending = False  # an overlapped gathering of parameters waits for the forward that needs them
        self._p2p = KnownShapes(self.groups.pp, config) if self.layout.pp > 1 else None

    @property
    def model(self) -> HiddenStatesModel:
        """The chunk nearest to the head; with virtual stages there are others (`chunks`)."""
        return self.chunks[-1]

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for index, chunk in enumerate(self.chunks):
            prefix = chunk_name(self.layout, index)
            for name, parameter in chunk.named_parameters():
                yield prefix + name, parameter

    def _train_mode(self, on: bool) -> None:
        for chunk in self.chunks:
            chunk.train(on)

    def _gather_parameters(self) -> None:
        if self._gather_pending:
            with self._entered():
                for chunk in self.ddp:
                    chunk.start_param_sync(force_sync=True)
            self._gather_pending = False

    def _batcher(self, batch: DataProto, reads: tuple[str, ...] = (), valid_only: bool = False) -> Batcher:
        """The replica's micro-batches: as many on every replica, those that have no rows weighing nothing."""
        batcher = Batcher(batch, self.cut, self.spec.vocab_size, reads, valid_only=valid_only,
                          scored=self.model.post_process, device=devices.device())
        count = own = batcher.plan()
        if self.layout.dp > 1:
            most = torch.tensor(count, device=devices.device())
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self.groups.dp)
            count = int(most)
        if self.layout.vpp > 1:  # the interleaved schedule takes them in groups of pp
            count = -(-count // self.layout.pp) * self.layout.pp
        if count != own:
            batcher.plan(count)
        return batcher

    def _schedule(
        self, batcher: Batcher, last: Callable[[MicroBatch, torch.Tensor], Any], forward_only: bool
    ) -> list[Any]:
        """Run all micro-batches through the pipeline -> what `last` gave for each (last stage; empty on the others)."""

        def step(micro_batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            micro = next(micro_batches)
            # right-padded and causal, or packed: no mask is needed
            packed = None if micro.lengths is None else packed_rows(micro.lengths, micro.input_ids.device)
            hidden = model(micro.input_ids, micro.position_ids, None, packed_seq_params=packed)
            return hidden, lambda output, non_loss_data=False: last(micro, output)

        interleaved = self.layout.vpp > 1
        if self._p2p is not None:
            ranks = self.layout.cp * self.cut.sequence_parallel  # that share the positions of a sequence
            shapes = [(t // ranks, b, self.spec.hidden_size) for b, t in batcher.shapes()]
            self._p2p.expect(shapes, self.layout.vpp, self.layout.pp if interleaved else None)
        run = get_forward_backward_func(pp_size=self.layout.pp, vp_size=self.layout.vpp if interleaved else None)
        results = run(
            forward_step_func=step,
            data_iterator=[iter(batcher) for _ in self.chunks] if interleaved else iter(batcher),
            model=self.ddp if interleaved else self.ddp[0],
            num_microbatches=len(batcher),
            seq_length=1,  # not used: see KnownShapes
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self.groups,
            force_all_reduce=self.keep_gradients,  # every replica then has the whole sum, not only its share
        )
        self._gather_pending = False  # every module has waited for its parameters
        return results

    def _head(
        self, micro: MicroBatch, hidden: torch.Tensor, temperature: float, entropy: bool
    ) -> dict[str, torch.Tensor]:
        """Final hidden states [T / cp, b, H] -> outputs of the scored tokens, [N] fp32, on every context-parallel rank.

        No other position gets logits.
        """
        scored = hidden.reshape(-1, hidden.shape[-1]).index_select(0, micro.hidden_index)
        weight = self._head_weight()
        if self.head == "value":
            outputs = {"values": F.linear(scored.float(), weight.float()).squeeze(-1)}
        else:
            log_probs, entropies = vocab_parallel_log_probs(
                scored, weight, micro.targets, self.groups.tp, self.spec.vocab_size, temperature, entropy=entropy
            )
            outputs = {"log_probs": log_probs} if entropies is None else {"log_probs": log_probs, "entropy": entropies}
        if micro.here is None:
            return outputs
        return {name: whole(values, micro.here, len(micro.slots), self.groups.cp) for name, values in outputs.items()}

    def _head_weight(self) -> torch.Tensor:
        shared = self.head == "lm" and self.spec.tied
        weight = self.model.shared_embedding_or_output_weight() if shared else self.model.output_layer.weight
        if self._overlaps_gather:  # no module of megatron-core's multiplies with it, so none waits for it
            group = self.ddp[-1].param_to_bucket_group[weight]
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        return weight

    def _micro_loss(
        self, loss: Loss, meta: dict[str, Any], temperature: float, entropy: bool, micro: MicroBatch,
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Metric]]:
        outputs = self._head(micro, hidden, temperature, entropy)
        # A sum over nothing of each output: exactly 0, and it keeps every rank in backward's collectives, whatever the
        # loss makes of a micro-batch without valid tokens.
        anchor = sum(values[:0].sum() for values in outputs.values())
        value, metrics = loss({name: micro.padded(values) for name, values in outputs.items()}, micro.fields, meta)
        # The middle item, a number of tokens, would be divided by; three items and calculate_per_token_loss: it is not.
        return value + anchor, torch.zeros((), dtype=torch.int), metrics

    def _finalize(self, chunks: list[torch.nn.Module], _: Any = None, pg_collection: Any = None,
                  force_all_reduce: bool = False) -> None:
        """Sum gradients over replicas (and the two copies of tied embeddings); the token count is left unused."""
        finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        if self.keep_gradients:
            named: Any = self._named_parameters()  # megatron-core adds main_grad to parameters
            self._gradients = {name: parameter.main_grad.detach().clone() for name, parameter in named}

    def _report(self, reports: list[dict[str, Metric]], applied: bool, norm: float | None = None,
                rate: float | None = None) -> dict[str, Metric]:
        metrics = merge(reports)
        if applied:
            self.step += 1
            metrics.update(grad_norm=Mean(norm, 1), lr=Mean(rate, 1))
        else:
            self.skipped_steps += 1
        if self.coordinates.dp == 0:  # counted once, not once per replica
            metrics["skipped"] = Sum(0 if applied else 1)
        return metrics
