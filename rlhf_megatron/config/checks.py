"""Everything about a config that can be known before a model is built: `check(config, ranks)` -> all violations.

The sizes that others derive are derived here once: `pool_sizes`, `data_parallel`, `responses_per_step`,
`active_roles`. Nothing imports torch; models are known by the config.json in their folder.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.config import artefacts
from rlhf_megatron.config.errors import Violation, nearest
from rlhf_megatron.config.schema import Config, ParallelConfig

ROLES = ("actor", "critic", "reference")


def check(config: Config, ranks: int, gpus: int = 0, ranks_per_node: int | None = None) -> list[Violation]:
    """Every rule that the config breaks, alone or on this job; empty: it may start.

    Args:
        config: as loaded, so every single value is within its range.
        ranks: processes of the job, all nodes together.
        gpus: GPUs of this node.
        ranks_per_node: processes on this node; None: what torchrun says, if it started us.
    """
    if ranks < 1:
        return [Violation("", f"{ranks} ranks: a job has at least one")]
    if ranks_per_node is None:
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    return [
        *_device(config, gpus, ranks_per_node),
        *_transport(config, ranks),
        *_pools(config, ranks),
        *_batches(config, ranks),
        *_micro_batches(config),
        *_data(config),
        *_algorithm(config),
        *_memory(config),
        *_trainer(config),
        *artefacts.data_files(config),
        *artefacts.models(config, active_roles(config)),
        *artefacts.reward(config),
        *artefacts.earlier_runs(config),
    ]


# ---- sizes ----


def active_roles(config: Config) -> tuple[str, ...]:
    """The roles that are built: the critic for an algorithm with values, the reference for a KL term."""
    wanted = {"actor": True, "critic": config.algorithm.name == "ppo", "reference": config.algorithm.kl.place != "none"}
    return tuple(role for role in ROLES if wanted[role])


def pool_sizes(config: Config, ranks: int) -> dict[str, int]:
    """Ranks of every pool, the pool of size 0 having all that remain. ValueError when they do not fit the job."""
    pools = config.cluster.pools
    text = ", ".join(f"{name}: {size}" for name, size in pools.items())
    if not pools:
        raise ValueError("no pool is named; write for example {main: 0}")
    rest = [name for name, size in pools.items() if size == 0]
    if len(rest) > 1:
        raise ValueError(f"{{{text}}}: only one pool may be 0 (all remaining ranks)")
    left = ranks - sum(pools.values())
    if left < 0 or (left > 0 and not rest):
        raise ValueError(f"{{{text}}} sums to {sum(pools.values())} but the job has {ranks} ranks; change a pool (0 = "
                         "all remaining) or start another number of ranks")
    if rest and left == 0:
        raise ValueError(f"{{{text}}} leaves no rank of {ranks} for pool {rest[0]}; shrink a pool or start more ranks")
    return {name: size or left for name, size in pools.items()}


def copy_ranks(parallel: ParallelConfig) -> int:
    """Ranks that together hold one copy of a role: tp x pp x cp."""
    return parallel.tp * parallel.pp * parallel.cp


def data_parallel(size: int, parallel: ParallelConfig) -> int:
    """Replicas of a role on a pool: size / (tp x pp x cp). ValueError when it does not divide."""
    share = copy_ranks(parallel)
    if size % share:
        legal = [n for n in range(1, size + 1) if size % n == 0]
        raise ValueError(f"{_degrees(parallel)} does not divide pool size({size}); choose degrees whose product is one "
                         f"of {legal}, or a multiple of {share} ranks")
    return size // share


def _degrees(parallel: ParallelConfig) -> str:
    context = f" x cp({parallel.cp})" if parallel.cp > 1 else ""
    return f"tp({parallel.tp}) x pp({parallel.pp}){context}"


def responses_per_step(config: Config) -> int:
    """Rows of one global batch."""
    return config.trainer.prompts_per_step * config.generation.samples_per_prompt


def smallest_job(config: Config) -> int:
    """The fewest ranks on which the config's pools hold whole copies of every active role."""
    if config.cluster.transport == "inline":
        return 1
    total = 0
    for name, size in config.cluster.pools.items():
        settings = [getattr(config, role) for role in active_roles(config)]
        copies = [copy_ranks(s.parallel) for s in settings if s.pool == name]
        total += size or math.lcm(1, *copies)
    return max(total, 1)


def single(config: Config) -> tuple[Config, list[str]]:
    """The same run in one process, and one sentence for every key that had to change."""
    changes: list[str] = []

    def put(section: Any, path: str, **values: Any) -> Any:
        for name, value in values.items():
            old = getattr(section, name)
            if old != value:
                changes.append(f"{path}.{name}: {old} -> {value}")
        return dataclasses.replace(section, **values)

    roles = {}
    for role in ROLES:
        settings = getattr(config, role)
        parallel = put(settings.parallel, f"{role}.parallel", tp=1, pp=1, cp=1, sp=False, vpp=1, layers=())
        roles[role] = dataclasses.replace(put(settings, role, pool="main"), parallel=parallel)
    cluster = put(config.cluster, "cluster", transport="inline")
    if tuple(cluster.pools) != ("main",) or cluster.pools["main"] > 1:
        cluster = put(cluster, "cluster", pools={"main": 0})
    generation = put(config.generation, "generation", tp=1)
    return dataclasses.replace(config, cluster=cluster, generation=generation, **roles), changes


# ---- the rules ----


def _device(config: Config, gpus: int, ranks_per_node: int) -> Iterator[Violation]:
    if config.run.device == "cuda" and gpus == 0:
        yield Violation("run.device", "is cuda but this node has 0 GPUs that can be seen; use cpu or auto, or look at "
                        "the driver and CUDA_VISIBLE_DEVICES")
    elif config.run.device != "cpu" and 0 < gpus < ranks_per_node:
        yield Violation("run.device", f"{ranks_per_node} ranks on this node but {gpus} GPUs; one rank takes one GPU: "
                        f"start {gpus} ranks per node, or set run.device to cpu")


def _transport(config: Config, ranks: int) -> Iterator[Violation]:
    if config.cluster.transport != "inline":
        return
    if ranks > 1:
        yield Violation("cluster.transport", f"inline is one process but the job has {ranks} ranks; use torchrun, or "
                        "start without a launcher")
    for role in active_roles(config):
        parallel = getattr(config, role).parallel
        if copy_ranks(parallel) > 1:
            yield Violation(f"{role}.parallel", f"{_degrees(parallel)} needs {copy_ranks(parallel)} ranks but "
                            "cluster.transport=inline is one process; start "
                            "with --single (all degrees 1), or use torchrun")


def _pools(config: Config, ranks: int) -> Iterator[Violation]:
    pools = config.cluster.pools
    used = set()
    for role in active_roles(config):
        pool = getattr(config, role).pool
        used.add(pool)
        if pool not in pools:
            close = nearest(pool, pools)
            hint = f"; did you mean {close}?" if close else ""
            yield Violation(f"{role}.pool", f"{pool!r} is none of cluster.pools: {', '.join(pools)}{hint}")
    for name in pools:
        if name not in used:
            yield Violation(f"cluster.pools.{name}", f"no role of this run ({', '.join(active_roles(config))}) is "
                            "placed there, so its ranks would idle; remove the pool or place a role in it")
    try:
        sizes = pool_sizes(config, ranks)
    except ValueError as error:
        yield Violation("cluster.pools", str(error))
        return
    if config.cluster.transport == "inline":
        return  # said by _transport, with the remedy that fits
    for role in active_roles(config):
        settings = getattr(config, role)
        if settings.parallel.sp and settings.parallel.tp == 1:
            yield Violation(f"{role}.parallel.sp", "splits sequences over the tp ranks, but tp is 1; set sp to false, "
                            "or tp to 2 or more")
        if settings.pool in sizes:
            try:
                data_parallel(sizes[settings.pool], settings.parallel)
            except ValueError as error:
                yield Violation(f"{role}.parallel", str(error))


def _batches(config: Config, ranks: int) -> Iterator[Violation]:
    trainer, total = config.trainer, responses_per_step(config)
    mini = trainer.mini_batch_size or total
    product = (f"prompts_per_step({trainer.prompts_per_step}) x samples_per_prompt"
               f"({config.generation.samples_per_prompt}) = {total} responses")
    if mini > total:
        yield Violation("trainer.mini_batch_size", f"{mini} is more than the step has: {product}; at most {total}, or "
                        "0 for all of them")
    elif total % mini:
        yield Violation("trainer.mini_batch_size", f"{mini} does not divide {product}; choose a divisor, or 0 for all")
    try:
        sizes = pool_sizes(config, ranks)
    except ValueError:
        return  # said by _pools
    said = "trainer.mini_batch_size" if trainer.mini_batch_size else "trainer.prompts_per_step"
    what = f"{mini} responses per update" if trainer.mini_batch_size else f"{product}, all of them one update,"
    for role in active_roles(config):
        settings = getattr(config, role)
        size = 1 if config.cluster.transport == "inline" else sizes.get(settings.pool, 0)
        share = copy_ranks(settings.parallel)
        if role == "reference" or not size or (size % share and size > 1):
            continue  # no updates there, or said by _pools
        dp = 1 if size == 1 else data_parallel(size, settings.parallel)
        if settings.micro_batch_tokens:  # rows as they fit
            if mini < dp:
                yield Violation(said, f"{what} are fewer than {role} dp({dp}), so replicas would idle; choose {dp} or "
                                "more, or let more ranks share a copy")
            continue
        unit = dp * settings.micro_batch_size
        if mini % unit:
            yield Violation(said, f"{what} are not a multiple of {role} dp({dp}) x micro_batch_size"
                            f"({settings.micro_batch_size}) = {unit}; choose a multiple of {unit}, or another "
                            f"{role}.micro_batch_size")


def _micro_batches(config: Config) -> Iterator[Violation]:
    longest = config.data.max_prompt_tokens + config.generation.max_response_tokens
    for role in active_roles(config):
        settings = getattr(config, role)
        parallel, limit = settings.parallel, settings.micro_batch_tokens
        # A sequence is padded so that every context- and sequence-parallel rank holds as much of it.
        context = 2 * parallel.cp if parallel.cp > 1 else 1
        multiple = math.lcm(context, parallel.cp * (parallel.tp if parallel.sp else 1))
        needed = -(-longest // multiple) * multiple
        if limit and limit // multiple * multiple < needed:
            padded = f", padded to {needed}" if needed != longest else ""
            yield Violation(f"{role}.micro_batch_tokens", f"{limit} cannot hold the longest row: max_prompt_tokens"
                            f"({config.data.max_prompt_tokens}) + max_response_tokens"
                            f"({config.generation.max_response_tokens}) = {longest}{padded}; set {needed} or more")
        if parallel.vpp > 1 and parallel.pp == 1:
            yield Violation(f"{role}.parallel.vpp", f"is {parallel.vpp}, but it splits pipeline stages and pp is 1; "
                            "set vpp to 1, or pp to 2 or more")
        elif parallel.layers and len(parallel.layers) != parallel.pp * parallel.vpp:
            yield Violation(f"{role}.parallel.layers", f"names {len(parallel.layers)} stages, but pp({parallel.pp}) x "
                            f"vpp({parallel.vpp}) = {parallel.pp * parallel.vpp}; give one number of layers for each")


def _data(config: Config) -> Iterator[Violation]:
    data = config.data
    if len(data.shots) % 2:
        yield Violation("data.shots", f"has {len(data.shots)} texts; it lists question, answer, question, answer: an "
                        "even number")
    for name in ("system", "shots"):
        if getattr(data, name) and not data.chat:
            yield Violation(f"data.{name}", "has no effect with data.chat=false, where the prompt is a raw string; put "
                            "the text into the prompts, or set data.chat to true")


def _algorithm(config: Config) -> Iterator[Violation]:
    algorithm, generation = config.algorithm, config.generation
    if algorithm.name == "grpo" and generation.samples_per_prompt == 1:
        yield Violation("generation.samples_per_prompt", "is 1, but algorithm.name=grpo compares the responses to one "
                        "prompt with each other; set 2 or more, or use ppo")
    if "" in generation.stop:
        yield Violation("generation.stop", "holds an empty text, which is found in every response; remove it")
    kl = algorithm.kl
    if kl.place == "none" and kl.coefficient > 0:
        yield Violation("algorithm.kl.coefficient", f"{kl.coefficient:g} has no effect with algorithm.kl.place=none; "
                        "set the place to reward or loss, or the coefficient to 0")
    if kl.place != "none" and kl.controller == "adaptive" and kl.coefficient == 0:
        yield Violation("algorithm.kl.coefficient", "is 0, which the adaptive controller can only multiply; start "
                        "above 0, or use controller=fixed to measure only")
    if generation.engine == "embedded" and generation.tp != 1:
        yield Violation("generation.tp", f"is {generation.tp}, but engine=embedded holds a whole copy on every rank; "
                        "set it to 1")


def _memory(config: Config) -> Iterator[Violation]:
    idle = [part for part in config.reference.offload if part != "parameters"]
    if idle:
        yield Violation("reference.offload", f"holds {', '.join(idle)}, but the reference is never updated: it has "
                        "parameters and nothing else; write [parameters], or [] to keep them on the device")


def _trainer(config: Config) -> Iterator[Violation]:
    trainer = config.trainer
    for role in ("actor", "critic"):
        optimizer = getattr(config, role).optimizer
        if role in active_roles(config) and optimizer.min_lr > optimizer.lr:
            yield Violation(f"{role}.optimizer.min_lr", f"{optimizer.min_lr:g} is above lr({optimizer.lr:g}); lower it")
    if trainer.critic_warmup_steps and "critic" not in active_roles(config):
        yield Violation("trainer.critic_warmup_steps", f"is {trainer.critic_warmup_steps}, but algorithm.name="
                        f"{config.algorithm.name} has no critic: nothing would be trained in these steps; set it to 0")
    elif trainer.critic_warmup_steps >= trainer.steps:
        yield Violation("trainer.critic_warmup_steps", f"{trainer.critic_warmup_steps} of trainer.steps"
                        f"({trainer.steps}) leave no step for the actor; lower it or train longer")
    if trainer.save_hf == "save" and not trainer.save_every:
        yield Violation("trainer.save_hf", "is save (with every checkpoint), but trainer.save_every=0 writes none; set "
                        "save_every, or save_hf to end or never")
