"""Vocabulary-sharded log-probs and entropy against closed forms and unchunked float64, on one rank and sharded."""

import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import run_ranks
from rlhf_megatron.mcore.logprobs import vocab_parallel_log_probs


def from_logits(logits, targets, **options):
    """Scores given logits: hidden states are the logits, the output embedding is the identity."""
    logits = torch.tensor(logits)
    n_tokens = logits.shape[1]
    return vocab_parallel_log_probs(logits, torch.eye(n_tokens), torch.tensor(targets), None, n_tokens, **options)


def reference(hidden, weight, targets, vocab_size, temperature):
    """Unchunked, unsharded, float64."""
    logits = hidden @ weight[:vocab_size].t() / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def example(n, hidden_size, rows, vocab_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, hidden_size, generator=generator)
    weight = torch.randn(rows, hidden_size, generator=generator)
    targets = torch.randint(0, vocab_size, (n,), generator=generator)
    wanted = torch.randn(2, n, generator=generator)  # weights of the two outputs in a scalar
    return hidden, weight, targets, wanted


def test_a_response_token_is_scored_by_the_logits_before_it():
    rows = [[0.0, 0.0, math.log(2)], [0.0, math.log(3), 0.0], [math.log(4), 0.0, math.log(5)]]
    log_probs, _ = from_logits(rows, [2, 1, 2])
    torch.testing.assert_close(log_probs, torch.tensor([-0.693147, -0.510826, -0.693147]), atol=1e-6, rtol=0)
    assert log_probs.sum().item() == pytest.approx(-1.897120, abs=1e-5)


def test_temperature_divides_the_logits_and_zero_scores_like_one():
    logits = [[math.log(4), 0.0]]
    assert from_logits(logits, [0], temperature=0.5)[0].item() == pytest.approx(-0.060625, abs=1e-6)
    assert from_logits(logits, [0])[0].item() == pytest.approx(-0.223144, abs=1e-6)
    assert from_logits(logits, [0], temperature=0)[0].item() == pytest.approx(-0.223144, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 256, 2047, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_unchunked_float64(chunk, temperature):
    hidden, weight, targets, wanted = example(2048, 16, 512, 500)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(h, w, targets, None, 500, temperature, chunk)
    assert log_probs.dtype == entropy.dtype == torch.float32
    ((log_probs * wanted[0] + entropy * wanted[1]).sum() / 2048).backward()
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_probs64, entropy64 = reference(h64, w64, targets, 500, temperature)
    ((log_probs64 * wanted[0] + entropy64 * wanted[1]).sum() / 2048).backward()
    for ours, exact in ((log_probs, log_probs64), (entropy, entropy64), (h.grad, h64.grad), (w.grad, w64.grad)):
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5)
    assert torch.count_nonzero(w.grad[500:]) == 0


@pytest.mark.parametrize("use", ["log_probs", "entropy", "one_position"])
def test_gradient_of_a_part_of_the_outputs(use):
    hidden, weight, targets, _ = example(9, 8, 30, 30)

    def scalar(log_probs, entropy):
        return {"log_probs": log_probs.sum(), "entropy": entropy.sum(), "one_position": log_probs[4]}[use]

    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    scalar(*vocab_parallel_log_probs(h, w, targets, None, 30, chunk=4)).backward()
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    scalar(*reference(h64, w64, targets, 30, 1.0)).backward()
    torch.testing.assert_close(h.grad.double(), h64.grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(w.grad.double(), w64.grad, atol=1e-5, rtol=1e-5)


def test_without_entropy_nothing_else_changes():
    hidden, weight, targets, _ = example(9, 8, 30, 30)
    w = weight.clone().requires_grad_()
    log_probs, nothing = vocab_parallel_log_probs(hidden, w, targets, None, 30, entropy=False)
    both = vocab_parallel_log_probs(hidden, weight, targets, None, 30)[0]
    assert nothing is None and torch.equal(log_probs, both)
    log_probs.sum().backward()
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("padding", [50.0, math.nan])
def test_padded_rows_do_not_matter(padding):
    hidden, weight, targets, _ = example(6, 8, 12, 11)
    weight[11] = padding * hidden[0] / hidden[0].square().sum()  # logit `padding` at the first position
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(h, w, targets, None, 11)
    exact, exact_entropy = reference(hidden, weight, targets, 11, 1.0)
    torch.testing.assert_close(log_probs, exact)
    torch.testing.assert_close(entropy, exact_entropy)
    (log_probs + entropy).sum().backward()
    assert h.grad.isfinite().all() and torch.count_nonzero(w.grad[11]) == 0


def test_large_logits_stay_finite_and_exact():
    log_probs, entropy = from_logits([[1000.0, 999.0, -1000.0]], [1])
    assert log_probs.item() == pytest.approx(-1.313262, abs=1e-6)
    assert entropy.item() == pytest.approx(0.582203, abs=1e-5)


def test_no_positions():
    w = torch.randn(5, 4, requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs(torch.zeros(0, 4), w, torch.zeros(0, dtype=torch.int64), None, 5)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.count_nonzero(w.grad) == 0


def test_a_target_outside_the_vocabulary_is_not_scored():
    log_probs, _ = from_logits([[0.0, 0.0], [0.0, 0.0]], [0, 2])
    assert log_probs[0].item() == pytest.approx(-math.log(2)) and log_probs[1].isnan()


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"chunk": 0}, "chunk=0"),
])
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        from_logits([[0.0, 0.0]], [0], **options)


def test_bf16_model_scores_in_fp32():
    hidden, weight, targets, _ = example(20, 16, 64, 64)
    h, w = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(h, w, targets, None, 64, chunk=7)
    (log_probs.sum() + entropy.sum()).backward()
    exact = reference(h.double(), w.double(), targets, 64, 1.0)[0]
    assert log_probs.dtype == torch.float32 and h.grad.dtype == w.grad.dtype == torch.bfloat16
    torch.testing.assert_close(log_probs.double(), exact, atol=0.1, rtol=0.01)


class PeakMemory(TorchDispatchMode):
    """Bytes of the storages that operations made while it is on, at their highest."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def test_memory_is_that_of_a_chunk():
    """2048 positions x 50,000 tokens would be 390.6 MiB; a chunk of 256 is 48.8 MiB and three of them are the limit."""
    hidden, weight, targets, _ = example(2048, 8, 50_000, 50_000)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    with PeakMemory() as memory:
        log_probs, entropy = vocab_parallel_log_probs(h, w, targets, None, 50_000, chunk=256)
        (log_probs.sum() + entropy.sum()).backward()
    assert memory.peak < 3 * 256 * 50_000 * 4, f"{memory.peak / 2**20:.1f} MiB"


# ---- sharded over ranks ----


def _uniform(rank, tp, rows, padded_logit):
    """All logits 0 over 11 real tokens; the padded rows' logits are `padded_logit`."""
    weight = torch.zeros(rows * tp, 4)
    weight[11:] = padded_logit
    shard = weight.chunk(tp)[rank]
    targets = torch.tensor([0, 5, 10])
    return vocab_parallel_log_probs(torch.ones(3, 4) / 4, shard, targets, torch.distributed.group.WORLD, 11)


@pytest.mark.parametrize(("tp", "rows"), [(2, 6), (4, 3), (4, 4)])
@pytest.mark.parametrize("padded_logit", [0.0, 50.0, math.nan])
def test_vocabulary_that_tp_does_not_divide(tp, rows, padded_logit):
    for log_probs, entropy in run_ranks(tp, _uniform, tp, rows, padded_logit):
        torch.testing.assert_close(log_probs, torch.full((3,), -2.397895), atol=1e-6, rtol=0)
        torch.testing.assert_close(entropy, torch.full((3,), 2.397895), atol=1e-6, rtol=0)


def _sharded(rank, tp, n, chunk, temperature):
    hidden, weight, targets, wanted = example(n, 16, 40, 38)
    h, w = hidden.requires_grad_(), weight.chunk(tp)[rank].clone().requires_grad_()
    group = torch.distributed.group.WORLD
    log_probs, entropy = vocab_parallel_log_probs(h, w, targets, group, 38, temperature, chunk)
    (log_probs * wanted[0] + entropy * wanted[1]).sum().backward()
    return log_probs.detach(), entropy.detach(), h.grad, w.grad


@pytest.mark.parametrize(("tp", "chunk"), [(2, 3), (4, 256)])
def test_sharded_equals_unsharded_float64(tp, chunk):
    results = run_ranks(tp, _sharded, tp, 10, chunk, 0.7)
    hidden, weight, targets, wanted = example(10, 16, 40, 38)
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_probs, entropy = reference(h64, w64, targets, 38, 0.7)
    (log_probs * wanted[0] + entropy * wanted[1]).sum().backward()
    for rank, result in enumerate(results):
        exact = (log_probs, entropy, h64.grad, w64.grad.chunk(tp)[rank])
        for ours, right in zip(result, exact, strict=True):
            torch.testing.assert_close(ours.double(), right.detach(), atol=1e-5, rtol=1e-5)
        assert torch.equal(result[0], results[0][0]) and torch.equal(result[1], results[0][1])


def test_no_positions_on_all_ranks_of_a_group():
    for log_probs, entropy, h_grad, w_grad in run_ranks(2, _sharded, 2, 0, 256, 1.0):
        assert log_probs.shape == entropy.shape == (0,) and h_grad.shape == (0, 16)
        assert torch.count_nonzero(w_grad) == 0
