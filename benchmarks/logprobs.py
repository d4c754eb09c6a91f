"""Log-probabilities and entropy from hidden states: our chunked kernel against the naive one, forward and backward.

    python benchmarks/logprobs.py [--positions 2048] [--hidden 576] [--vocab 50000] [--repeats 3]

Naive means: fp32 logits of all positions at once, log_softmax, gather, and the entropy from the same tensor. Values and
gradients of both are compared first. The peak is what the process holds beyond the inputs and their gradients, sampled
while the kernel runs in a process of its own. The last line is one JSON object:

    extra_mb         extra peak memory of ours, forward and backward with entropy, MiB
    extra_naive_mb   the same of the naive one
    ratio_naive      naive time / our time (medians of alternating runs)
    tp2_ms           our time with the vocabulary on two ranks
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from rlhf_megatron.mcore.logprobs import vocab_parallel_log_probs

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    return vocab_parallel_log_probs(hidden, weight, targets, None, weight.shape[0])


def inputs(positions: int, hidden: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(positions, hidden, generator=generator).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=generator) / hidden**0.5).requires_grad_()
    return states, weight, torch.randint(0, vocab, (positions,), generator=generator)


def run(kernel: Kernel, data: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Values and gradients of sum(log_probs) + 0.01 * sum(entropy)."""
    log_probs, entropy = kernel(*data)
    assert entropy is not None
    gradients = torch.autograd.grad(log_probs.sum() + 0.01 * entropy.sum(), data[:2])
    return [log_probs.detach(), entropy.detach(), *gradients]


def peak(name: str, sizes: tuple[int, int, int], out: str) -> None:
    """In a process of its own: the highest resident size over inputs and both gradients, in MiB."""
    torch.set_num_threads(1)
    data = inputs(*sizes)
    small = (data[0][:8].detach().requires_grad_(), data[1][:512].detach().requires_grad_(), data[2][:8] % 512)
    run(KERNELS[name], small)  # libraries and their buffers
    held = [torch.ones_like(tensor) for tensor in data[:2]]  # room for the gradients, touched
    base = resident()
    del held
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    run(KERNELS[name], data)
    Path(out).write_text(str(highest() - base))


def resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def highest() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def two_ranks(rank: int, sizes: tuple[int, int, int], store: str, repeats: int) -> None:
    """Each rank holds half of the vocabulary; rank 0 writes the median time and checks one value."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    states, weight, targets = inputs(*sizes)
    half = weight.detach()[rank * sizes[2] // 2 : (rank + 1) * sizes[2] // 2].clone().requires_grad_()
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        found = run(lambda *data: vocab_parallel_log_probs(*data, dist.group.WORLD, sizes[2]), (states, half, targets))
        times.append(time.perf_counter() - start)
    with torch.no_grad():
        exact = naive(states[:64], weight, targets[:64])[0]
    torch.testing.assert_close(found[0][:64], exact, atol=1e-4, rtol=1e-5)
    if rank == 0:
        Path(store + ".ms").write_text(str(statistics.median(times) * 1000))
    dist.barrier()
    dist.destroy_process_group()


KERNELS: dict[str, Kernel] = {"ours": ours, "naive": naive}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (arguments.positions, arguments.hidden, arguments.vocab)
    data = inputs(*sizes)
    for mine, exact in zip(run(ours, data), run(naive, data), strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-4, rtol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in KERNELS}
    for _ in range(arguments.repeats):
        for name, kernel in KERNELS.items():
            start = time.perf_counter()
            run(kernel, data)
            times[name].append(time.perf_counter() - start)
    extra: dict[str, float] = {}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for name in KERNELS:
            out = f"{folder}/{name}"
            process = spawn.Process(target=peak, args=(name, sizes, out))
            process.start()
            process.join()
            extra[name] = float(Path(out).read_text())
        store = f"{folder}/store"
        ranks = [spawn.Process(target=two_ranks, args=(rank, sizes, store, arguments.repeats)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            assert rank.exitcode == 0
        tp2 = float(Path(store + ".ms").read_text())
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name in KERNELS:
        print(f"{name:<6} {medians[name] * 1000:8.0f} ms, extra peak {extra[name]:7.0f} MiB")
    print(f"ours on two ranks {tp2:.0f} ms")
    print(json.dumps({"extra_mb": round(extra["ours"], 1), "extra_naive_mb": round(extra["naive"], 1),
                      "ratio_naive": round(medians["naive"] / medians["ours"], 3), "tp2_ms": round(tp2, 1)}))


if __name__ == "__main__":
    main()
