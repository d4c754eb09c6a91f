"""What surrounds the loop: prompts, rewards, the algorithm's tensor functions, metrics, checkpoints, the display."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron import devices
from rlhf_megatron.algorithms import kl, registry
from rlhf_megatron.algorithms.losses import denominator
from rlhf_megatron.config.load import to_yaml
from rlhf_megatron.controller.worker_group import WorkerGroup
from rlhf_megatron.data.prompts import RLHFDataset
from rlhf_megatron.data.proto import DataProto, Ragged
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.observe import metrics as metric_types
from rlhf_megatron.observe import report
from rlhf_megatron.observe.log import MetricsLog
from rlhf_megatron.observe.metrics import Metric
from rlhf_megatron.observe.progress import Progress
from rlhf_megatron.observe.timeline import Timeline
from rlhf_megatron.observe.timers import Timers
from rlhf_megatron.rewards import score
from rlhf_megatron.trainer import gates, throughput
from rlhf_megatron.trainer.batch_metrics import policy_metrics, reward_metrics
from rlhf_megatron.trainer.checkpoints import Checkpoints
from rlhf_megatron.trainer.throughput import Tokens


class StepMetrics:
    """The metrics of the step that is running; `add` merges exactly (numerators and counts, extrema)."""

    def __init__(self) -> None:
        self.current: dict[str, Metric] = {}
        self.first_update: dict[str, Metric] = {}  # what the step's first update of the actor reported, alone

    def add(self, new: dict[str, Metric]) -> None:
        if "actor/ratio_max" in new and not self.first_update:
            self.first_update = new
        self.current = metric_types.merge([self.current, new])

    def take(self) -> dict[str, float]:
        """Plain values, and a fresh start. A metric without a single count has no value and is left out."""
        values = {name: metric.value for name, metric in self.current.items()}
        self.current, self.first_update = {}, {}
        return {name: value for name, value in values.items() if value is not None}


def read_prompts(config: Any) -> RLHFDataset:
    """The checked prompts of a config, encoded by the actor's tokenizer. Needs no models.

    Raises:
        DataError: see RLHFDataset; or fewer usable rows than a step takes.
        TokenizerError: the model directory has no tokenizer, or one without the chat template that is asked for.
    """
    dataset = RLHFDataset(config.data, load_tokenizer(config.actor.model), seed=config.trainer.seed)
    if config.trainer.rollouts.replay is None:
        dataset.check_batch(config.trainer.prompts_per_step)
    return dataset


class Run:
    """One run in its folder. The loop calls its methods in the order of trainer/ppo.py.

    Args:
        config: the checked config.
        groups: all roles by name ("actor", and "critic" and "reference" where the algorithm has them).
        dataset: from `read_prompts`, if that was called already.
    """

    def __init__(self, config: Any, groups: dict[str, WorkerGroup], dataset: RLHFDataset | None = None) -> None:
        self.config = config
        self.groups = {role: group for role, group in groups.items() if role in ("actor", "critic")}  # the trained ones
        self.folder = Path(config.run.folder) / config.run.name
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        self.dataset = dataset or read_prompts(config)
        self.algorithm = registry.get(config.algorithm.name)
        self.kl_controller = kl.controller(config.algorithm.kl)
        self.metrics = StepMetrics()
        self.ranks = len({rank for group in groups.values() for rank in group.pool.ranks})
        self.models = throughput.read_models(config)
        self.peak_tflops = config.run.peak_tflops or devices.peak_tflops(config.run.dtype)
        self.worked: dict[str, Tokens] = {}  # what went through each phase of the step that is running
        self.checkpoints = Checkpoints(self.folder, config.trainer.keep, self._meaning())
        self.first_step, self.good_steps, self.stopped = 1, 0, False
        resumed = self.checkpoints.find(config.trainer.resume)
        if resumed is not None:
            step, state = self.checkpoints.load(resumed, self.groups)
            self.first_step, self.good_steps = step + 1, state["good_steps"]
            self.dataset.load_state(state["data"])
            self.kl_controller.load_state(state["kl"])
            print(f"resumed from {resumed}: continuing at step {self.first_step}", flush=True)
        elif aside := self.checkpoints.set_aside():
            print(f"a fresh run: the checkpoints of an earlier one are kept in {aside}", flush=True)
        self.log = MetricsLog(self.folder, resume_step=self.first_step - 1)
        self.timeline = Timeline(self.folder)
        for group in groups.values():
            group.watch(self.timeline.add)
        self.progress = Progress(total=config.trainer.steps, start=self.first_step - 1)
        self.timers = Timers(on_start=self.progress.phase)
        self._step_started = time.perf_counter()

    def _meaning(self) -> dict[str, Any]:
        """What may not change on resume. Layouts, micro-batches, logging and the number of steps may."""
        config = self.config
        meaning = {"actor.model": config.actor.model, "run.dtype": config.run.dtype,
                   "trainer.seed": config.trainer.seed}
        for section in ("data", "algorithm", "reward", "generation"):
            for key, value in dataclasses.asdict(getattr(config, section)).items():
                meaning[f"{section}.{key}"] = value
        for key in ("prompts_per_step", "mini_batch_size", "epochs", "critic_warmup_steps"):
            meaning[f"trainer.{key}"] = getattr(config.trainer, key)
        for key in ("generation.engine", "generation.tp", "generation.batch_size"):
            meaning.pop(key, None)
        return meaning

    # ---- the steps of the loop, in order ----

    def steps(self) -> Iterator[int]:
        """Step numbers from 1 (or after the resumed one) until the end or the stop rule."""
        with self.progress:
            for step in range(self.first_step, self.config.trainer.steps + 1):
                self.timers.reset()
                self.worked = {}
                self._step_started = time.perf_counter()
                yield step
                if self.stopped:
                    break

    def together(self, calls: dict[str, tuple[WorkerGroup, str]], batch: DataProto) -> Iterator[Any]:
        """Start calls (phase -> group and method) with one batch, then give their results, in order.

        Roles on pools of their own work at the same time, roles of one pool one after the other. A phase is timed from
        its start to its end as far as the loop waits for it.
        """
        futures = {}
        for phase, (group, method) in calls.items():
            with self.timers(phase):
                futures[phase] = group.start(method, batch)
        for phase, future in futures.items():
            with self.timers(phase):
                result = future.result()
            yield result

    def rollout(self, actor: WorkerGroup, step: int) -> DataProto:
        """The step's prompts with sampled responses, or the saved rollout of that step when replaying."""
        replay = self.config.trainer.rollouts.replay
        if replay is not None:
            return DataProto.load(Path(replay) / f"step_{step:06d}")
        prompts = self.dataset.next(self.config.trainer.prompts_per_step)
        batch = prompts.repeat(self.config.generation.samples_per_prompt)
        batch = batch.union(DataProto(non_tensors={"sample_id": list(range(len(batch)))}))
        generated, metrics = actor.generate(batch, step=step)
        self.metrics.add(metrics)
        batch = batch.union(generated)
        self.worked["generate"] = tokens_of(batch)
        return batch

    def score(self, batch: DataProto) -> DataProto:
        """Adds `token_level_scores` by the configured reward (unless a replayed rollout brings them)."""
        if "token_level_scores" not in batch:
            batch = batch.union(score(self.config.reward, batch, self.dataset.tokenizer))
        self.metrics.add(reward_metrics(batch))
        return batch

    def advantages(self, batch: DataProto) -> DataProto:
        """Adds what the algorithm makes of the whole global batch: rewards after KL, advantages, returns."""
        lengths = batch["responses"].lengths
        fields = {name: value.pad(0) for name, value in batch.tensors.items()
                  if isinstance(value, Ragged) and name != "prompts" and torch.equal(value.lengths, lengths)}
        new, metrics = self.algorithm.advantages(
            fields, torch.tensor(batch["group_id"]), self.config.algorithm,
            kl_coefficient=self.kl_controller.coefficient,
        )
        inside = batch["responses"].mask()
        made = {name: Ragged(value[inside], lengths) for name, value in new.items()}
        self.metrics.add(metrics)
        self.metrics.add(policy_metrics(batch, self.config))
        return batch.union(DataProto(tensors=made))

    def mini_batches(self, batch: DataProto, step: int) -> Iterator[DataProto]:
        """The optimizer updates of the step, each with the one global denominator of its loss in `meta`."""
        trainer, algorithm = self.config.trainer, self.config.algorithm
        for epoch in range(trainer.epochs):
            # The whole batch in one update needs no order; otherwise every epoch has its own, fixed by seed and step.
            seed = _order_seed(trainer.seed, step, epoch) if trainer.mini_batch_size else None
            for mini in batch.mini_batches(trainer.mini_batch_size or len(batch), shuffle_seed=seed):
                mask = mini["response_mask"].pad(False)
                mini.meta["denominator"] = denominator(mask, algorithm.loss_aggregation)
                mini.meta["kl_coefficient"] = self.kl_controller.coefficient
                if mini.meta["denominator"] > 0:
                    for phase in ("update_critic", "update_actor"):
                        if phase == "update_critic" or self.trains_actor(step):
                            self.worked[phase] = self.worked.get(phase, Tokens()) + tokens_of(mini, valid_only=True)
                    yield mini
                else:
                    self.metrics.add({"actor/empty_updates": metric_types.Sum(1)})

    def trains_actor(self, step: int) -> bool:
        """False while only the critic is warmed up."""
        return step > self.config.trainer.critic_warmup_steps

    def end_step(self, step: int, batch: DataProto) -> None:
        """Log, adapt the KL coefficient, save, decide whether to stop."""
        trainer = self.config.trainer
        seconds = time.perf_counter() - self._step_started
        tokens = tokens_of(batch)
        self.worked |= {"old_log_prob": tokens, "reference": tokens, "values": tokens}
        flops = sum(throughput.phase_flops(self.models, self.worked).values())
        first_update = self.metrics.first_update
        values = self.metrics.take()
        values |= {name: metric.value for name, metric in self.timers.metrics().items()}
        values["timing/step"] = seconds
        values |= throughput.rates(flops, tokens.total, seconds, self.ranks, self.peak_tflops)
        self.kl_controller.update(values.get("kl/ref"), len(batch))
        said = list(gates.warnings(values, self.config))
        if step == 1:
            said += gates.first_step_warnings(values, first_update, self.config)
        for warning in said:
            self.progress.say(f"warning: step {step}: {warning}")
        if trainer.rollouts.save:
            batch.select([name for name in batch.names() if name not in _MADE_BY_THE_LOOP]).save(
                self.folder / "rollouts" / f"step_{step:06d}"
            )
        self.log.write(step, values)
        self.progress.step(step, values)
        reached = trainer.stop_reward is not None and values["reward/mean"] >= trainer.stop_reward
        self.good_steps = self.good_steps + 1 if reached else 0
        self.stopped = trainer.stop_reward is not None and self.good_steps >= trainer.stop_patience
        last = self.stopped or step == trainer.steps
        if trainer.save_every and (step % trainer.save_every == 0 or last):
            state = {"data": self.dataset.state(), "kl": self.kl_controller.state(), "good_steps": self.good_steps}
            path = self.checkpoints.save(step, self.groups, state)
            if trainer.save_hf == "save":
                self.groups["actor"].export(directory=str(self.folder / "hf" / path.name))

    def finish(self) -> None:
        """Export the final HF checkpoint, draw the curves, print where the time went."""
        if self.config.trainer.save_hf == "end":
            final = self.folder / "hf" / "final"
            if final.exists():  # of an earlier run under this name: kept, like its metrics
                number = next(n for n in itertools.count(1) if not final.with_name(f"final.{n}").exists())
                final.rename(final.with_name(f"final.{number}"))
            print(f"HF checkpoint: {self.groups['actor'].export(directory=str(final))}", flush=True)
        self.log.close()
        self.timeline.close()
        print(report.write(self.folder), flush=True)


def tokens_of(batch: DataProto, valid_only: bool = False) -> Tokens:
    """Token counts of a batch's rows. `valid_only`: as an update does, score only what `response_mask` lets through."""
    scored = int(batch["response_mask"].values.sum()) if valid_only else None
    return Tokens.of(batch["prompts"].lengths.tolist(), batch["responses"].lengths.tolist(), scored)


def _order_seed(seed: int, step: int, epoch: int) -> int:
    """A seed in 31 bits from three numbers, the same in every version of Python (unlike `hash`)."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {epoch}".encode(), digest_size=4).digest()) >> 1


# Made anew from a replayed rollout; saving them would tie it to the weights of the run that wrote it.
_MADE_BY_THE_LOOP = {
    "old_log_probs", "ref_log_probs", "values", "entropy", "advantages", "returns", "token_level_rewards",
}
