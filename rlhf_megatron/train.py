"""Start a run: parse the config, check all of it, build the roles, run the loop.

    python -m rlhf_megatron.train CONFIG [--single] [key=value ...]
    torchrun --nproc-per-node 4 -m rlhf_megatron.train CONFIG [key=value ...]

Exit codes: 0 finished, 2 the config was refused (nothing was started), 1 anything else.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rlhf-megatron train", description="Train a policy as a YAML config says.")
    parser.add_argument("config", help="path of the YAML config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example actor.optimizer.lr=1e-5")
    parser.add_argument("--single", action="store_true",
                        help="one process: set every parallel degree to 1 and cluster.transport to inline, say so")
    return parser.parse_intermixed_args(argv)


def read_config(arguments: argparse.Namespace, ranks: int) -> Any:
    """The checked config, whose reward function can be called. Raises ConfigError with all violations at once."""
    from rlhf_megatron import devices
    from rlhf_megatron.config import checks, load
    from rlhf_megatron.config.errors import Violation

    config = load.load_config(arguments.config, arguments.overrides)
    if arguments.single:
        config, changes = checks.single(config)
        for change in changes:
            print(f"--single: {change}", flush=True)
    violations = checks.check(config, ranks=ranks, gpus=devices.gpu_count())
    if violations:
        raise load.ConfigError.of(violations)
    from rlhf_megatron.rewards import RewardError, find_reward

    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as with `python -m`: a module of the user's is found however we were started
    try:
        find_reward(config.reward.function, dict(config.reward.arguments))
    except RewardError as error:
        raise load.ConfigError.of([Violation("reward.function", str(error))]) from error
    return config


def loop(config: Any, groups: dict[str, Any], dataset: Any = None) -> int:
    """What runs beside rank 0: build everything around the loop, run it, finish. `dataset`: see `Run`."""
    from rlhf_megatron.trainer.ppo import train
    from rlhf_megatron.trainer.run import Run

    run = Run(config, groups, dataset)
    train(run, groups["actor"], groups.get("critic"), groups.get("reference"))
    run.finish()
    return 0


def roles_of(config: Any) -> dict[str, Any]:
    """The roles that this run needs, by name: nothing is built that nobody asks for."""
    from rlhf_megatron.algorithms import registry
    from rlhf_megatron.workers.actor import ActorWorker
    from rlhf_megatron.workers.critic import CriticWorker
    from rlhf_megatron.workers.reference import ReferenceWorker

    needs = registry.get(config.algorithm.name).needs(config.algorithm)
    roles: dict[str, Any] = {"actor": ActorWorker}
    if "values" in needs:
        roles["critic"] = CriticWorker
    if "reference" in needs:
        roles["reference"] = ReferenceWorker
    return roles


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    single = arguments.single
    rank = 0 if single else int(os.environ.get("RANK", "0"))
    ranks = 1 if single else int(os.environ.get("WORLD_SIZE", "1"))
    from rlhf_megatron.config.load import ConfigError

    try:
        config = read_config(arguments, ranks)
    except ConfigError as error:
        if rank == 0:
            print(f"{arguments.config}: refused\n{error}", file=sys.stderr, flush=True)
        return 2
    from rlhf_megatron import devices

    devices.choose(config.run.device, config.run.deterministic)
    if rank == 0:
        print(f"device {devices.device()}, backend {devices.backend()}, dtype {config.run.dtype}, ranks {ranks}, "
              f"transport {config.cluster.transport}", flush=True)
    from rlhf_megatron.controller.transports import transport

    folder, roles = Path(config.run.folder) / config.run.name, roles_of(config)
    if rank == 0:
        print(f"building {', '.join(roles)} from {config.actor.model}", flush=True)
    from rlhf_megatron.trainer.run import read_prompts

    prompts: list[Any] = []
    try:
        return transport(config.cluster.transport).run(
            config, roles, lambda groups: loop(config, groups, *prompts), log_folder=folder,
            prepare=lambda: prompts.append(read_prompts(config)),
        )
    except Exception as error:  # only inline: other transports have said the first cause and ended the job
        if not getattr(error, "explains_itself", False):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    # os._exit is not used here: the transport has already ended its threads and process groups.
    sys.exit(main())
