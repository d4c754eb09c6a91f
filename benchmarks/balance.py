"""Assigning rows to data-parallel replicas: our `balance` against verl 0.9.1's Karmarkar-Karp partitions.

    python benchmarks/balance.py [--rows 16384] [--parts 128] [--repeats 7] [--verl build/verl]

The lengths are log-normal (exp(N(6.5, 1)), 1 to 32,768 tokens, fixed seed); both get the same list and must return
equal numbers of rows per part. verl lives in a virtual environment of its own, made on first use from the package index
that pip is configured for; torch and transformers, which its modules import, it borrows from the environment that runs
this. The two take turns, one call each, in two processes. The last line is one JSON object:

    imbalance         largest part / mean part - 1 of ours; checked to be at most 0.001
    ms                our time, median
    verl_imbalance    the same of verl; null where it cannot be installed
    verl_ms
    ratio_verl        verl's time / our time
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from rlhf_megatron.data.balance import balance

ROOT = Path(__file__).resolve().parents[1]
# What verl.utils.seqlen_balancing needs to be imported, beside what requirements/cpu.txt has.
PACKAGES = (
    "verl==0.9.1", "ray==2.60.0", "tensordict==0.10.0", "attrs==26.1.0", "cloudpickle==3.1.3", "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1", "msgpack==1.2.4", "orjson==3.13.0", "pyvers==0.2.3", "referencing==0.37.0",
    "rpds-py==2026.9.1",
)
# One line of JSON in: lengths and number of parts. Then, for every line in, one call; its parts and seconds out.
SERVER = """
import json, os, sys, time
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.append(sys.argv[1])
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
lengths, parts = json.loads(sys.stdin.readline())
for _ in sys.stdin:
    start = time.perf_counter()
    rows = get_seqlen_balanced_partitions(lengths, parts, equal_size=True)
    seconds = time.perf_counter() - start
    print(json.dumps([rows, seconds]), file=out, flush=True)
"""


def draw(rows: int) -> list[int]:
    drawn = np.random.default_rng(0).normal(6.5, 1.0, rows)
    return np.clip(np.exp(drawn), 1, 32768).astype(np.int64).tolist()


def imbalance(lengths: list[int], rows: list[list[int]]) -> float:
    """Largest part / mean part - 1, after looking that every row is there once and counts are equal."""
    assert sorted(row for part in rows for row in part) == list(range(len(lengths)))
    assert len({len(part) for part in rows}) == 1
    loads = [sum(lengths[row] for row in part) for part in rows]
    return max(loads) * len(loads) / sum(loads) - 1


class Verl:
    """verl's function in a process of its own."""

    def __init__(self, folder: Path, lengths: list[int], parts: int) -> None:
        python = folder / "bin" / "python"
        if not (folder / ".done").is_file():
            print(f"installing verl into {folder}", file=sys.stderr)
            venv.create(folder, with_pip=True)
            install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES]
            subprocess.run(install, check=True, timeout=300, stdout=sys.stderr)
            (folder / ".done").touch()
        self.process = subprocess.Popen([str(python), "-c", SERVER, sysconfig.get_paths()["purelib"]],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask(json.dumps([lengths, parts]))

    def _ask(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def run(self) -> tuple[list[list[int]], float]:
        """One call: (rows of each part, seconds). OSError: the process has ended."""
        self._ask("")
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            raise OSError(f"verl's process ended with code {self.process.wait()}")
        rows, seconds = json.loads(answer)
        return rows, seconds

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def start_verl(folder: Path, lengths: list[int], parts: int) -> Verl | None:
    """None, and the reason on stderr, when it cannot be installed or imported."""
    try:
        verl = Verl(folder, lengths, parts)
        verl.run()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"verl is left out: {error}", file=sys.stderr)
        return None
    return verl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--parts", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--verl", type=Path, default=ROOT / "build" / "verl", help="its virtual environment")
    arguments = parser.parse_args()
    if arguments.rows % arguments.parts:
        parser.error(f"--parts {arguments.parts} must divide --rows {arguments.rows}: verl wants equal numbers of rows")
    lengths, parts = draw(arguments.rows), arguments.parts
    verl = start_verl(arguments.verl, lengths, parts)
    ours = balance(lengths, parts)  # warm, as verl is
    times: list[float] = []
    verl_times: list[float] = []
    verl_imbalance = None
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        again = balance(lengths, parts)
        times.append(time.perf_counter() - start)
        assert again == ours, "two calls gave two results"
        if verl is not None:
            theirs, seconds = verl.run()
            verl_imbalance = imbalance(lengths, theirs)
            verl_times.append(seconds)
    if verl is not None:
        verl.close()
    found = imbalance(lengths, ours)
    assert found <= 0.001, found
    ms = statistics.median(times) * 1000
    verl_ms = statistics.median(verl_times) * 1000 if verl_times else None
    print(f"{arguments.rows} rows, {sum(lengths)} tokens, {parts} parts of {arguments.rows // parts} rows")
    print(f"ours {ms:8.1f} ms, largest part {found:.4%} above the mean")
    if verl_ms is not None:
        print(f"verl {verl_ms:8.1f} ms, largest part {verl_imbalance:.4%} above the mean")
    print(json.dumps({
        "imbalance": round(found, 7),
        "ms": round(ms, 2),
        "verl_imbalance": None if verl_imbalance is None else round(verl_imbalance, 7),
        "verl_ms": None if verl_ms is None else round(verl_ms, 2),
        "ratio_verl": None if verl_ms is None else round(verl_ms / ms, 2),
    }))


if __name__ == "__main__":
    main()
