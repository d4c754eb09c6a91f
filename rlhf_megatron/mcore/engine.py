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
from rlhf_megatron.layouts.spec import ModelSpec, ParallelLayout
from rlhf_megatron.mcore import cpu_seam

cpu_seam.install()  # before anything of megatron.core is imported

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402

from rlhf_megatron.mcore import checkpoint, groups  # noqa: E402
from rlhf_megatron.mcore import optimizer as optimizers  # noqa: E402
from rlhf_megatron.mcore.batching import Batcher, MicroBatch  # noqa: E402
from rlhf_megatron.mcore.logprobs import vocab_parallel_log_probs  # noqa: E402
from rlhf_megatron.mcore.model import build_model  # noqa: E402
from rlhf_megatron.mcore.offload import Storages, needs  # noqa: E402
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
        micro_batch_size: rows per forward on this replica.
        sequence_parallel: norms and residuals are split over the tensor-parallel ranks, too (needs tp above 1).
        recompute: activations that are made anew in backward: "none", "selective" (core attention) or "full" (layers).
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
        sequence_parallel: bool = False,
        recompute: str = "none",
        optimizer: Any | None = None,
        total_steps: int = 1,
        seed: int = 1,
    ) -> None:
        if head not in HEADS:
            raise ValueError(f"head={head!r}: one of {', '.join(HEADS)}")
        if trainable and optimizer is None:
            raise ValueError("a trainable engine needs optimizer settings; pass optimizer=, or trainable=False")
        self.spec, self.layout, self.head = spec, layout, head
        self.micro_batch_size, self.settings, self.total_steps = micro_batch_size, optimizer, total_steps
        self.dtype, self.seed = devices.dtype(dtype), seed
        self.sequence_parallel, self.recompute = sequence_parallel, recompute
        self.step = 0  # optimizer updates made; skipped ones do not count
        self.skipped_steps = 0
        self.keep_gradients = False
        self._gradients: dict[str, torch.Tensor] | None = None
        self.groups = groups.build_groups(layout)
        self.coordinates = layout.coordinates(torch.distributed.get_rank())
        self.is_last_stage = self.coordinates.pp == layout.pp - 1
        self.is_output = self.is_last_stage and self.coordinates.tp == 0 and self.coordinates.cp == 0
        with self._entered():
            self._build(trainable)
        self.storages = Storages(self)

    # ---- weights ----

    @needs("parameters")
    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters under their MegatronLayout names: the storage that is trained, not copies."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

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
            self.model.eval()
            parts = self._schedule(
                batcher, lambda micro, hidden: (micro.places, self._head(micro, hidden, temperature, entropy)),
                forward_only=True,
            )
            self.model.train()
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
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.model.train()
            reports = self._schedule(
                batcher, partial(self._micro_loss, loss, dict(batch.meta), temperature, entropy), forward_only=False
            )
            rate = optimizers.learning_rate(self.settings, self.step, self.total_steps)
            optimizers.apply_settings(self.optimizer, self.settings, rate)
            norm, applied = optimizers.update(self.optimizer, self.settings.clip_grad)
        return self._report(reports, applied, norm, rate)

    # ---- checkpoints ----

    @needs("parameters", "optimizer")
    def save(self, directory: str | Path) -> None:
        """Write model, optimizer, counters and random streams. Collective over the pool."""
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
        self.model = build_model(
            self.spec, self.layout, self.groups, self.dtype, head=self.head, trainable=trainable,
            sequence_parallel=self.sequence_parallel, recompute=self.recompute,
        )
        config = self.model.config
        config.calculate_per_token_loss = True  # DDP then sums over replicas and the schedule does not divide
        config.finalize_model_grads_func = self._finalize
        self.ddp, self.optimizer = self.model, None
        if trainable:
            self.ddp = DistributedDataParallel(
                config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True, use_distributed_optimizer=optimizers.is_distributed(self.settings)
                ),
                self.model,
                pg_collection=self.groups,
            )
            self.optimizer = optimizers.build_optimizer(self.settings, [self.ddp], self.groups, self.dtype)
        self._p2p = P2PCommunicator(pp_group=self.groups.pp, config=config) if self.layout.pp > 1 else None

    def _batcher(self, batch: DataProto, reads: tuple[str, ...] = (), valid_only: bool = False) -> Batcher:
        return Batcher(
            batch, self.micro_batch_size, self.spec.vocab_size, reads,
            valid_only=valid_only, one_length=self.layout.pp > 1, device=devices.device(),
            multiple=self.layout.tp if self.sequence_parallel else 1,
        )

    def _schedule(
        self, batcher: Batcher, last: Callable[[MicroBatch, torch.Tensor], Any], forward_only: bool
    ) -> list[Any]:
        """Run all micro-batches through the pipeline -> what `last` gave for each (last stage; empty on the others)."""

        def step(micro_batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            micro = next(micro_batches)
            hidden = model(micro.input_ids, micro.position_ids, None)  # right-padded and causal: no mask is needed
            return hidden, lambda output, non_loss_data=False: last(micro, output)

        run = get_forward_backward_func(pp_size=self.layout.pp, vp_size=None)
        return run(
            forward_step_func=step,
            data_iterator=iter(batcher),
            model=self.ddp,
            num_microbatches=len(batcher),
            seq_length=batcher.sequence_length,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=self._p2p,
            pg_collection=self.groups,
            force_all_reduce=self.keep_gradients,  # every replica then has the whole sum, not only its share
        )

    def _head(
        self, micro: MicroBatch, hidden: torch.Tensor, temperature: float, entropy: bool
    ) -> dict[str, torch.Tensor]:
        """Final hidden states [T, b, H] -> outputs of the scored tokens, [N] fp32. No other position gets logits."""
        scored = hidden.reshape(-1, hidden.shape[-1]).index_select(0, micro.hidden_index)
        weight = self._head_weight()
        if self.head == "value":
            return {"values": F.linear(scored.float(), weight.float()).squeeze(-1)}
        log_probs, entropies = vocab_parallel_log_probs(
            scored, weight, micro.targets, self.groups.tp, self.spec.vocab_size, temperature, entropy=entropy
        )
        return {"log_probs": log_probs} if entropies is None else {"log_probs": log_probs, "entropy": entropies}

    def _head_weight(self) -> torch.Tensor:
        shared = self.head == "lm" and self.spec.tied
        return self.model.shared_embedding_or_output_weight() if shared else self.model.output_layer.weight

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
            self._gradients = {name: p.main_grad.detach().clone() for name, p in self.model.named_parameters()}

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
