"""The checks of what a config points at: data files, model folders, the reward's module, checkpoints and rollouts.

Files are looked at, never loaded, and nothing that a config names is imported here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rlhf_megatron.config.errors import Violation, nearest
from rlhf_megatron.config.schema import Config, ParallelConfig

DATA_SUFFIXES = (".jsonl", ".parquet")
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_REGISTER = re.compile(rf"^@register\(\"({_NAME})\"\)", re.MULTILINE)
_REGISTERED = re.compile(rf"{_NAME}\Z")
_MODULE_FUNCTION = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME})\Z")


def data_files(config: Config) -> Iterator[Violation]:
    """The training files exist, can be read and have a known format."""
    train = config.data.train
    paths = [train] if isinstance(train, str) else list(train)
    if not paths:
        yield Violation("data.train", "names no file; give one .jsonl or .parquet path or more")
    for name in paths:
        problem = _file_problem(Path(name))
        if problem:
            yield Violation("data.train", f"{name} {problem}")


def _file_problem(path: Path) -> str | None:
    if path.suffix not in DATA_SUFFIXES:
        return f"is neither {' nor '.join(DATA_SUFFIXES)}; convert it"
    if not path.exists():
        here = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        return f"does not exist{here}; make it, or correct the path"
    if not path.is_file():
        return "is not a file"
    if not os.access(path, os.R_OK):
        return "cannot be read; look at its permissions"
    return "is empty" if path.stat().st_size == 0 else None


def models(config: Config, roles: tuple[str, ...]) -> Iterator[Violation]:
    """Every role's model folder has a config.json that the role's degrees divide, and all share one vocabulary."""
    known: dict[str, tuple[dict[str, Any] | None, str]] = {}
    vocabularies: dict[str, int] = {}
    for role in roles:
        settings = getattr(config, role)
        folder = settings.model or config.actor.model
        first = folder not in known
        if first:
            known[folder] = read_model_config(folder)
        model, problem = known[folder]
        if model is None:
            if first:
                yield Violation(f"{role}.model", f"{folder} {problem}")
            continue
        for message in _degree_problems(model, settings.parallel):
            yield Violation(f"{role}.parallel", f"{message} (model {folder})")
        if first and (limit := _number(model, "max_position_embeddings")):
            prompt, response = config.data.max_prompt_tokens, config.generation.max_response_tokens
            if prompt + response > limit:
                yield Violation("generation.max_response_tokens", f"data.max_prompt_tokens({prompt}) + "
                                f"max_response_tokens({response}) = {prompt + response} is more than the {limit} "
                                f"positions of {folder}; lower one of them")
        if size := _number(model, "vocab_size"):
            vocabularies[role] = size
    if len(set(vocabularies.values())) > 1:
        text = ", ".join(f"{role} {size}" for role, size in vocabularies.items())
        yield Violation("actor.model", f"the roles' vocabularies differ ({text}), but they read the same tokens; use "
                        "models of one tokenizer")


def read_model_config(folder: str) -> tuple[dict[str, Any] | None, str]:
    """config.json of an HF folder, or None and what is wrong with it."""
    path = Path(folder)
    if not path.is_dir():
        return None, "is not a folder; download or make the HF checkpoint and give its folder"
    file = path / "config.json"
    if not file.is_file():
        return None, "has no config.json, so it is not an HF checkpoint; give the folder that holds it"
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return None, f"has a config.json that cannot be read: {error}"
    return (model, "") if isinstance(model, dict) else (None, "has a config.json that is no JSON object")


def _number(model: dict[str, Any], name: str) -> int | None:
    value = model.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _degree_problems(model: dict[str, Any], parallel: ParallelConfig) -> Iterator[str]:
    tp, stages = parallel.tp, parallel.pp * parallel.vpp
    heads = _number(model, "num_attention_heads")
    divided = {"num_attention_heads": heads, "num_key_value_heads": _number(model, "num_key_value_heads") or heads,
               "intermediate_size": _number(model, "intermediate_size")}
    sizes = [size for size in divided.values() if size]
    for name, size in divided.items():
        if size and size % tp:
            legal = [t for t in range(1, min(sizes) + 1) if not any(s % t for s in sizes)]
            yield f"{name}({size}) is not a multiple of tp({tp}); choose tp from {legal}"
    layers = _number(model, "num_hidden_layers")
    if layers and parallel.layers and sum(parallel.layers) != layers:
        yield (f"parallel.layers {list(parallel.layers)} sum to {sum(parallel.layers)}, but num_hidden_layers is "
               f"{layers}; change a stage")
    elif layers and not parallel.layers and layers % stages:
        legal = [p for p in range(1, layers + 1) if not layers % p]
        what = "pp" if parallel.vpp == 1 else "pp x vpp"
        degrees = f"pp({parallel.pp})" if parallel.vpp == 1 else f"pp({parallel.pp}) x vpp({parallel.vpp}) = {stages}"
        yield (f"num_hidden_layers({layers}) is not a multiple of {degrees}; choose {what} from {legal}, or give every "
               "stage's number in parallel.layers")


# ---- the reward's code ----


def reward(config: Config) -> Iterator[Violation]:
    """`reward.function` is a registered name, or a function in a module of the user's own."""
    function = config.reward.function
    found = _MODULE_FUNCTION.match(function)
    if found:
        problem = _module_problem(found[1])
        if problem:
            yield Violation("reward.function", f"{function}: {problem}")
    elif not _REGISTERED.match(function):
        yield Violation("reward.function", f"{function!r} is neither a registered name nor module:function, for "
                        "example my_rewards.maths:score (a module in the working directory or on PYTHONPATH; no path)")
    elif (names := registered_rewards()) and function not in names:
        close = nearest(function, names)
        hint = f"; did you mean {close}?" if close else f"; there are {', '.join(names)}, or name module:function"
        yield Violation("reward.function", f"no reward is called {function!r}{hint}")


def registered_rewards() -> list[str]:
    """Names of the built-in rewards, read from their source: importing them would import torch."""
    folder = Path(__file__).resolve().parents[1] / "rewards"
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))]
    return sorted({name for text in texts for name in _REGISTER.findall(text)})


def _module_problem(module: str) -> str | None:
    """Why code of this module may not be a reward. A config may come from anywhere, so what it names is confined to
    code that the user wrote: the working directory, PYTHONPATH, editable installs."""
    top, *rest = module.split(".")
    if top == "rlhf_megatron":
        return None if rest[:1] == ["rewards"] else "of this package only rlhf_megatron.rewards holds rewards"
    if top in sys.stdlib_module_names:
        return f"{top} is Python's standard library, not a reward; wrap what you need in a module of your own"
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None:
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            spec = None
    if spec is None:
        return f"there is no module {top} in {os.getcwd()} or on PYTHONPATH"
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [Path(spec.origin)] if spec.origin else []
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    if any(place.resolve().is_relative_to(root) for place in [*places, *files] for root in installed):
        return f"{top} is an installed package, not a reward; wrap what you need in a module of your own"
    for depth, name in enumerate(rest):  # found by name alone: importing a parent would run it
        last = depth == len(rest) - 1
        next_places = [place / name for place in places if (place / name).is_dir()]
        if not next_places and not (last and any((place / f"{name}.py").is_file() for place in places)):
            return f"{'.'.join([top, *rest[:depth]])} has no module {name}"
        places = next_places
    return None


# ---- what earlier runs left ----


def earlier_runs(config: Config) -> Iterator[Violation]:
    """The checkpoint to resume from and the rollouts to replay are there."""
    resume, replay = config.trainer.resume, config.trainer.rollouts.replay
    if resume not in ("auto", "never") and not (Path(resume) / "trainer.json").is_file():
        what = "has no trainer.json, so it is no complete checkpoint" if Path(resume).is_dir() else "is not a folder"
        yield Violation("trainer.resume", f"{resume} {what}; name a step_NNNNNN folder, or use auto or never")
    if replay is not None and not Path(replay).is_dir():
        yield Violation("trainer.rollouts.replay", f"{replay} is not a folder; name one of step_NNNNNN, or null")
    target = Path(config.run.folder)
    if target.exists() and not target.is_dir():
        yield Violation("run.folder", f"{target} is a file; name a folder")
