"""Figures of a benchmark as a table, as JSON, and as one line in a folder of records."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.job import Timing


def hardware(ranks: int) -> dict[str, Any]:
    """What it ran on, without the names of hosts: device, CPU, ranks."""
    from rlhf_megatron import devices

    return {"device": devices.product_name(), "cpu": _cpu_model(), "ranks": ranks}


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": platform.python_version()}
    for package in ("torch", "megatron-core", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    from rlhf_megatron import __version__

    return found | {"rlhf_megatron": __version__}


def shape(config: Any) -> dict[str, Any]:
    """The actor's model, by its sizes: a path would say nothing elsewhere."""
    from rlhf_megatron.layouts.hf import read_spec

    spec = read_spec(config.actor.model)
    names = ("family", "num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "head_dim",
             "vocab_size")
    return {name: getattr(spec, name) for name in names}


def settings(config: Any, built: Iterable[str]) -> dict[str, Any]:
    """What the figures were measured with; `built`: the roles that were there."""
    roles = {}
    for role in built:
        own = dataclasses.asdict(getattr(config, role))
        # paths say nothing elsewhere, and how the optimizer is set does not change what a step costs
        roles[role] = own.pop("parallel") | {k: v for k, v in own.items() if k not in ("model", "pool", "optimizer")}
    return {"algorithm": config.algorithm.name, "dtype": config.run.dtype, "deterministic": config.run.deterministic,
            "roles": roles}


def rates(
    timings: Mapping[str, Timing], tokens: int, flops: Mapping[str, int], ranks: int, peak: float | None
) -> dict[str, dict[str, float | None]]:
    """Figures of every phase, and of "all": the phases one after the other, each token counted once.

    `tokens` went through every phase that has `flops` (by phase, all ranks together); the others move bytes. `ranks`:
    of the job. `share` is of the sum of all phases; `mfu` is None where the device's peak (10^12 operations a second)
    is unknown.
    """
    whole = sum(timing.seconds for timing in timings.values())
    highest = max(timing.memory_mb for timing in timings.values())
    found: dict[str, dict[str, float | None]] = {}
    for name, timing in [*timings.items(), ("all", Timing(whole, highest, ranks))]:
        work = sum(flops.values()) if name == "all" else flops.get(name)
        rate = tokens / timing.seconds if work else None
        tflops = work / timing.seconds / timing.ranks / 1e12 if work else None
        found[name] = {
            "seconds": timing.seconds, "share": timing.seconds / whole, "tokens_per_s": rate,
            "tokens_per_s_per_gpu": None if rate is None else rate / timing.ranks, "tflops_per_gpu": tflops,
            "mfu": tflops / peak if tflops is not None and peak else None, "memory_peak_mb": timing.memory_mb,
        }
    return found


COLUMNS = (("seconds", "seconds", "10.4f"), ("share", "share", "7.1%"), ("tokens/s", "tokens_per_s", "12,.0f"),
           ("tokens/s/GPU", "tokens_per_s_per_gpu", "12,.0f"), ("TFLOP/s/GPU", "tflops_per_gpu", "11.4f"),
           ("MFU", "mfu", "7.1%"), ("peak MiB", "memory_peak_mb", "9,.0f"))


def table(phases: Mapping[str, Mapping[str, float | None]]) -> str:
    """One line a phase; "-" where there is nothing to say. On CPUs "GPU" is a rank."""
    width = max(len(name) for name in ("phase", *phases))
    head = [f"{title:>{_width(form)}}" for title, _, form in COLUMNS]
    lines = [f"{'phase':<{width}}  " + "  ".join(head)]
    for name, figures in phases.items():
        cells = [f"{'-':>{_width(form)}}" if figures[key] is None else f"{figures[key]:{form}}"
                 for _, key, form in COLUMNS]
        lines.append(f"{name:<{width}}  " + "  ".join(cells))
    return "\n".join(lines)


def finish(figures: Mapping[str, Any], folder: Path) -> None:
    """Print the table and, as the last line, the JSON; append a record to `folder`/<benchmark>.jsonl."""
    told = rounded(figures)
    record = {"benchmark": told["benchmark"],
              "date": datetime.datetime.now(datetime.UTC).date().isoformat(), **told}
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{told['benchmark']}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(table(figures["phases"]))
    print(json.dumps(told), flush=True)


def rounded(value: Any) -> Any:
    """Five significant digits: what is behind them is noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return value


def _width(form: str) -> int:
    return int(form.split(",")[0].split(".")[0])


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
