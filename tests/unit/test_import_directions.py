"""Imports point downward only. Read from the syntax trees: nothing is imported, lazy imports count, too."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "rlhf_megatron"

# Room -> what it may import of ours besides itself and the bottom. "*" is everything: the entry points build all roles.
BOTTOM = {"observe", "data", "config", "devices"}
ALLOWED: dict[str, set[str]] = {
    "cli": {"*"},
    "train": {"*"},
    "trainer": {"controller", "algorithms", "rewards", "layouts"},
    "controller": {"workers.base"},
    "workers": {"generation", "reshard", "mcore", "algorithms", "layouts"},
    "reshard": {"generation.engine", "mcore", "layouts"},
    "generation": {"layouts"},
    "mcore": {"layouts"},
    "planning": {"layouts"},
    "layouts": set(),
    "algorithms": set(),
    "rewards": set(),
    # the bottom imports nothing of ours but each other downward
    "data": {"config", "observe", "devices"},
    "config": set(),
    "observe": set(),
    "devices": set(),
}
NO_TORCH = ("layouts", "config", "planning")
# foreign package -> the only places that import it (prefixes of our module names)
ONLY_IN = {
    "megatron": ("rlhf_megatron.mcore",),
    "vllm": ("rlhf_megatron.generation.vllm_engine",),
    "ray": ("rlhf_megatron.controller.transports.ray_actors",),
}


@dataclass(frozen=True)
class Import:
    module: str       # the importing module
    target: str       # what it imports, as far as the statement says: a.b for `from a import b` and for `import a.b`
    line: int
    at_start: bool    # runs when the module is imported (not in a function, not under TYPE_CHECKING)


def modules() -> dict[str, Path]:
    """Module name -> file, for everything in the package and the converters."""
    found = {}
    for top in (PACKAGE, "model_converters"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> list[Import]:
    found: list[Import] = []
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, at_start: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(module, name.name, node.lineno, at_start) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found.extend(Import(module, f"{base}.{name.name}", node.lineno, at_start) for name in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, at_start)
        else:
            later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                visit(child, at_start and not later)

    visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)), True)
    return found


MODULES = modules()
IMPORTS = [item for module, path in MODULES.items() for item in imports_of(module, path)]


def inside(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violation(item: Import) -> str | None:
    """What is wrong with one import, or None."""
    where = f"{item.module}:{item.line} imports {item.target}"
    top = item.target.split(".")[0]
    if top in ONLY_IN and not any(inside(item.module, place) for place in ONLY_IN[top]):
        return f"{where}: {top} is imported only in {', '.join(ONLY_IN[top])}"
    if top == "model_converters" and not inside(item.module, "model_converters"):
        return f"{where}: the package does not import its converters"
    if top != PACKAGE or inside(item.module, "model_converters") or item.module == PACKAGE:
        return None
    room = item.module.split(".")[1]
    target = item.target.removeprefix(PACKAGE + ".")
    if room not in ALLOWED:
        return f"{item.module}: no rule for the room {room!r}; add one to ALLOWED here and to CONTRIBUTING.md"
    if target == PACKAGE or inside(target, room):
        return None
    may = ALLOWED[room] | (BOTTOM if room not in BOTTOM else set())
    if "*" in may or any(inside(target, place) for place in may):
        return None
    return f"{where}: {room} may import {', '.join(sorted(may)) or 'nothing of ours'}"


def test_every_import_points_downward():
    assert [text for item in IMPORTS if (text := violation(item))] == []


def test_rooms_without_torch_reach_it_by_no_chain_of_imports():
    """Transitively: importing a module runs its packages' __init__ files and everything that these import at start."""
    at_start: dict[str, set[str]] = {}
    for item in IMPORTS:
        if item.at_start:
            at_start.setdefault(item.module, set()).add(item.target)

    def runs(target: str) -> set[str]:
        """Our modules that an import of `target` runs: every package on the way, and the last name if a module."""
        parts = target.split(".")
        return {name for n in range(1, len(parts) + 1) if (name := ".".join(parts[:n])) in MODULES}

    def chain_to_torch(module: str, seen: set[str]) -> list[str] | None:
        for target in sorted(at_start.get(module, ())):
            if inside(target, "torch"):
                return [module, "torch"]
        for target in sorted(at_start.get(module, ())):
            for ours in sorted(runs(target) - seen):
                seen.add(ours)
                if (rest := chain_to_torch(ours, seen)) is not None:
                    return [module, *rest]
        return None

    chains = []
    for room in NO_TORCH:
        for module in MODULES:
            if inside(module, f"{PACKAGE}.{room}"):
                seen = runs(module)
                chains += [chain for name in sorted(seen) if (chain := chain_to_torch(name, seen))]
    assert [" -> ".join(chain) for chain in chains] == []


@pytest.mark.parametrize("room", [room for room in NO_TORCH if f"{PACKAGE}.{room}" in MODULES])
def test_rooms_without_torch_do_not_load_it(room):
    """The same once more by doing it: this sees torch behind other libraries, which the syntax trees do not."""
    names = [module for module in MODULES if inside(module, f"{PACKAGE}.{room}")]
    code = (f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
            "sys.exit('torch was loaded' if 'torch' in sys.modules else 0)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_module_takes_the_name_of_a_top_level_package():
    taken = {"platform", "megatron", "ray", "vllm", "torch"}
    assert [module for module in MODULES if module.rpartition(".")[2] in taken] == []


@pytest.mark.parametrize(("module", "target", "allowed"), [
    ("rlhf_megatron.controller.dispatch", "rlhf_megatron.workers.base.Worker", True),
    ("rlhf_megatron.controller.dispatch", "rlhf_megatron.workers.actor.ActorWorker", False),
    ("rlhf_megatron.reshard.session", "rlhf_megatron.generation.engine.Sampling", True),
    ("rlhf_megatron.reshard.session", "rlhf_megatron.generation.embedded.EmbeddedEngine", False),
    ("rlhf_megatron.observe.log", "rlhf_megatron.data.proto.DataProto", False),
    ("rlhf_megatron.algorithms.gae", "rlhf_megatron.observe.metrics.Mean", True),
    ("rlhf_megatron.algorithms.gae", "megatron.core.parallel_state", False),
    ("rlhf_megatron.trainer.ppo", "rlhf_megatron.mcore.engine", False),
])
def test_the_rules_themselves(module, target, allowed):
    assert (violation(Import(module, target, 1, True)) is None) is allowed
