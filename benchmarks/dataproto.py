"""DataProto: time of the operations that the loop does every step, each checked against plain Python rows.

    python benchmarks/dataproto.py [--rows 1024] [--response 1400] [--repeats 5]

The default batch is 1,024 rows with about 50 MiB of tensors. Prints one line an operation (best of the repeats) and, as
the last line, one JSON object: operation -> milliseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.data.proto import DataProto, Ragged


def make_batch(rows: int, response: int) -> DataProto:
    """Prompts of up to 512 tokens, responses of `response` / 2 to `response` * 3/2 tokens, eight fields over them."""
    rng = random.Random(0)
    torch.manual_seed(0)

    def field(lengths: torch.Tensor, dtype: torch.dtype) -> Ragged:
        return Ragged(torch.randint(0, 50_000, (int(lengths.sum()),)).to(dtype), lengths)

    short = torch.tensor([rng.randint(32, 512) for _ in range(rows)])
    long = torch.tensor([rng.randint(response // 2, response * 3 // 2) for _ in range(rows)])
    kinds = {"responses": torch.int64, "response_mask": torch.bool}
    floats = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages", "returns")
    kinds.update(dict.fromkeys(floats, torch.float32))
    tensors = {"prompts": field(short, torch.int64), **{name: field(long, kind) for name, kind in kinds.items()}}
    return DataProto(tensors, {"sample_id": list(range(rows)), "row": [{"answer": i} for i in range(rows)]})


def check_rows(batch: DataProto, source: DataProto, order: list[int]) -> None:
    """Every row of `batch` is the row of `source` that `order` names, in every field."""
    assert batch["sample_id"] == [source["sample_id"][i] for i in order]
    for name, value in batch.tensors.items():
        rows = list(source[name])
        assert all(torch.equal(row, rows[i]) for row, i in zip(value, order, strict=True)), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--response", type=int, default=1400)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(options.rows, options.response)
    rows, everything = len(batch), list(range(len(batch)))
    size = sum(v.values.nbytes + v.lengths.nbytes for v in batch.tensors.values()) / 2**20
    print(f"{rows} rows, {len(batch.names())} fields, {size:.1f} MiB, one thread")
    results: dict[str, float] = {}

    def measure(name: str, work: Callable[[], Any]) -> Any:
        best = float("inf")
        for _ in range(options.repeats):
            start = time.perf_counter()
            result = work()
            best = min(best, time.perf_counter() - start)
        results[name] = round(best * 1e3, 3)
        print(f"{name:<16} {best * 1e3:9.3f} ms")
        return result

    pieces = measure("chunk_8", lambda: batch.chunk(8))
    joined = measure("concat_8", lambda: DataProto.concat(pieces))
    assert joined.equal(batch)
    order = torch.randperm(rows).tolist()
    check_rows(measure("reorder", lambda: batch.reorder(order)), batch, order)
    repeated = measure("repeat_2", lambda: batch.repeat(2))
    check_rows(repeated, batch, [i for i in everything for _ in range(2)])
    minis = measure("mini_batches_16", lambda: list(batch.mini_batches(-(-rows // 16), shuffle_seed=1)))
    check_rows(DataProto.concat(minis), batch, [i for mini in minis for i in mini["sample_id"]])
    padded = measure("pad_responses", lambda: batch["responses"].pad(0))
    for row, whole in zip(padded, batch["responses"], strict=True):
        assert torch.equal(row[: len(whole)], whole) and not row[len(whole):].any()
    mask = batch["responses"].mask()
    assert measure("unpad_responses", lambda: Ragged.from_padded(padded, mask)).equal(batch["responses"])
    half = batch.select(["prompts", "sample_id"])
    assert measure("union", lambda: half.union(batch)).equal(batch)
    with tempfile.TemporaryDirectory() as folder:
        measure("save", lambda: batch.save(Path(folder) / "batch"))
        assert measure("load", lambda: DataProto.load(Path(folder) / "batch")).equal(batch)
    print(json.dumps({"benchmark": "dataproto", "rows": rows, "mib": round(size, 1), "milliseconds": results}))


if __name__ == "__main__":
    main()
