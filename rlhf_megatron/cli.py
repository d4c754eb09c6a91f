"""The command line.

    rlhf-megatron check CONFIG [--ranks N] [--gpus N] [--ranks-per-node N] [--single] [key=value ...]
    rlhf-megatron train CONFIG [--single] [key=value ...]

`check` reads the config and compares it with the job, without a model and without torch. Exit codes: 0 it may start,
2 it is refused (all problems in one message on stderr).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from rlhf_megatron import __version__
from rlhf_megatron.config import checks
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_config
from rlhf_megatron.config.schema import Config

USAGE = (__doc__ or "").strip()


def visible_gpus() -> int:
    """GPUs of this node, counted without torch: device files, narrowed by CUDA_VISIBLE_DEVICES."""
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    names = [name.strip() for name in chosen.split(",")]
    return min(present, len([name for name in names if name not in ("", "-1", "NoDevFiles")]))


def describe(config: Config, ranks: int) -> str:
    """What the job will look like, in a few lines."""
    sizes = {"main": 1} if config.cluster.transport == "inline" else checks.pool_sizes(config, ranks)
    lines = [f"{config.run.name}: {config.algorithm.name}, {ranks} ranks, transport {config.cluster.transport}, "
             f"device {config.run.device}, {config.run.dtype}"]
    for role in checks.active_roles(config):
        settings = getattr(config, role)
        size = sizes.get(settings.pool, 1)
        lines.append(f"  {role:<10} pool {settings.pool} ({size}): TP{settings.parallel.tp} PP{settings.parallel.pp} "
                     f"DP{checks.data_parallel(size, settings.parallel)}, micro-batch {settings.micro_batch_size}")
    trainer, total = config.trainer, checks.responses_per_step(config)
    mini = trainer.mini_batch_size or total
    lines.append(f"  a step: {trainer.prompts_per_step} prompts x {config.generation.samples_per_prompt} = {total} "
                 f"responses, {total // mini} updates of {mini} x {trainer.epochs} epochs; {trainer.steps} steps")
    return "\n".join(lines)


def count(text: str) -> int:
    """An argparse type: a number of ranks."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def check(argv: list[str]) -> int:
    """The command `check`."""
    parser = argparse.ArgumentParser(prog="rlhf-megatron check", description="Check a config; nothing is started.")
    parser.add_argument("config", help="path of the YAML config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example actor.optimizer.lr=1e-5")
    parser.add_argument("--ranks", type=count, help="processes of the job (default: the fewest that fit)")
    parser.add_argument("--gpus", type=int, help="GPUs per node (default: those of this machine)")
    parser.add_argument("--ranks-per-node", type=count, help="processes per node, compared with the GPUs")
    parser.add_argument("--single", action="store_true", help="check what `train --single` would run")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.single:
            config, changes = checks.single(config)
            for change in changes:
                print(f"--single: {change}")
        ranks = 1 if arguments.single else arguments.ranks or checks.smallest_job(config)
        gpus = visible_gpus() if arguments.gpus is None else arguments.gpus
        violations = checks.check(config, ranks, gpus, arguments.ranks_per_node)
        if violations:
            raise ConfigError(violations)
    except ConfigError as error:
        print(f"{arguments.config}: refused\n{error}", file=sys.stderr)
        return 2
    print(f"{describe(config, ranks)}\nOK")
    return 0


def train(argv: list[str]) -> int:
    """The command `train`: everything else is in rlhf_megatron.train."""
    from rlhf_megatron.train import main as run

    return run(argv)


def main(argv: list[str] | None = None) -> int:
    """Run a command; the return value is the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {"check": check, "train": train}
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    if arguments in (["--version"], ["version"]):
        print(__version__)
        return 0
    asked = arguments in (["-h"], ["--help"], ["help"])
    print(USAGE if asked else f"{USAGE}\n\nfirst word: one of {', '.join(commands)}",
          file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
