"""The real job on four ranks (TP2 x PP2, real Megatron workers) when a rank, a reward or a number goes wrong."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from jobs import arguments, metrics, run_job, run_loop
from rlhf_megatron.train import loop as train_loop
from rlhf_megatron.workers.actor import ActorWorker

FIRST = "First cause:"
KINDS = ("raise", "exit", "kill")
PLACES = ("reshard", "generate", "update")
SHORT = [  # every kind in every place, every rank, rank 0 with every kind
    ("raise", "reshard", 1), ("raise", "generate", 0), ("raise", "update", 3),
    ("exit", "reshard", 0), ("exit", "generate", 2), ("exit", "update", 1),
    ("kill", "reshard", 2), ("kill", "generate", 3), ("kill", "update", 0),
]
REST = [(kind, place, rank) for kind in KINDS for place in PLACES for rank in range(4)
        if (kind, place, rank) not in SHORT]


def failing_actor(kind: str, place: str, rank: int) -> type[ActorWorker]:
    """An actor of which one rank fails in its second step, in the middle of what the other ranks take part in."""

    class FailingActor(ActorWorker):
        step = calls = 0

        def fail(self, *_: object) -> None:
            self.calls += self.step == 2
            if self.context.rank != rank or self.calls < (2 if place == "update" else 1):
                return
            if kind == "raise":
                raise ValueError("planted 42")
            if kind == "exit":
                os._exit(1)
            os.kill(os.getpid(), signal.SIGKILL)

        def generate(self, batch, step, greedy=False):
            self.step = step
            if place == "reshard":  # the others are about to exchange weights
                tensors = self.engine.tensors
                self.session.trainer_tensors = lambda: (self.fail(), tensors())[1]
            if place == "generate":  # while tokens are sampled
                self.generator.model.base_model.register_forward_pre_hook(self.fail)
            return super().generate(batch, step=step, greedy=greedy)

        def update(self, batch):
            if place == "update" and self.step == 2:  # in the pipeline's schedule, between its sends and receives
                self.engine.model.decoder.register_forward_pre_hook(self.fail)
            return super().update(batch)

    return FailingActor


def check_fault(demo, runs, kind, place, rank):
    result = run_loop(arguments(demo, runs, "run"), 4, train_loop, timeout=100,
                      workers={"actor": failing_actor(kind, place, rank)})
    assert not result.timed_out and result.seconds < 60 and all(result.codes), (result.seconds, result.codes)
    assert result.codes[rank] == (-signal.SIGKILL if kind == "kill" else 1)
    assert result.left_behind == 0
    called = "actor.update" if place == "update" else "actor.generate"
    cause = {"raise": f"rank {rank} (pool main) failed in {called}: ValueError: planted 42"}.get(
        kind, "rank 0 (pool main), which runs the loop, was lost" if rank == 0
        else f"rank {rank} (pool main) was lost in {called}")
    tail = "\n".join(result.output.splitlines()[-50:])
    assert result.output.count(FIRST) == 1 and result.output.count(cause) == 1 and cause in tail, result.output
    (kept,) = (runs / "run" / "errors").iterdir()
    assert cause in kept.read_text()
    assert [line["step"] for line in metrics(runs, "run")] == [1]  # whole lines, of finished steps only


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "place", "rank"), SHORT)
def test_a_rank_fails_in_a_real_step(demo, tmp_path, kind, place, rank):
    check_fault(demo, tmp_path, kind, place, rank)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "place", "rank"), REST)
def test_any_rank_fails_anywhere(demo, tmp_path, kind, place, rank):
    check_fault(demo, tmp_path, kind, place, rank)


@pytest.mark.timeout(120)
def test_an_interrupt_ends_a_real_step(demo, tmp_path):
    """Ctrl-C reaches every rank at once."""

    class Interrupted(ActorWorker):
        def update(self, batch):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            return super().update(batch)

    result = run_loop(arguments(demo, tmp_path, "run"), 4, train_loop, workers={"actor": Interrupted})
    assert all(result.codes) and result.seconds < 60 and result.left_behind == 0
    assert result.output.count(FIRST) == 1 and "SIGINT" in result.output
    assert result.output.count("Traceback") <= 1, result.output


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_nan_on_a_valid_token_skips_the_update_and_says_so(demo, tmp_path, ranks):
    class Poisoned(ActorWorker):
        def log_probs(self, batch):
            scored = super().log_probs(batch)
            if scored is not None and not self.engine.step:
                scored["old_log_probs"].values[0] = torch.nan
            return scored

    def loop(config, groups):
        skipped, original = [], groups["actor"].update

        def update(mini):
            found = original(mini)
            skipped.append(found["actor/skipped"].value)
            return found

        groups["actor"].update = update
        train_loop(config, groups)
        print("skipped:", skipped)
        return 0

    layout = ["--single"] if ranks == 1 else []
    result = run_loop(arguments(demo, tmp_path, "run", *layout, "trainer.mini_batch_size=32"), ranks, loop,
                      workers={"actor": Poisoned})
    assert result.codes == [0] * ranks, result.output
    # no update was made, so the first one is tried again and again
    assert "skipped: [1.0, 1.0, 1.0]" in result.output
    for step, line in enumerate(metrics(tmp_path, "run"), start=1):
        assert f"warning: step {step}: actor/skipped 1" in result.output
        assert line["actor/skipped"] == 1 and "actor/grad_norm" not in line


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("override", "said"), [
    ("data.max_prompt_tokens=2", "row 1: the prompt has 3 tokens, above data.max_prompt_tokens 2"),
    ("trainer.prompts_per_step=1024", "fewer than trainer.prompts_per_step 1024"),
    ("data.prompt_key=question", "no column 'question' (data.prompt_key)"),
])
def test_prompts_that_cannot_be_used_end_the_job_while_it_is_built(demo, tmp_path, ranks, override, said):
    layout = ["--single"] if ranks == 1 else []
    result = run_job(arguments(demo, tmp_path, "run", *layout, override), ranks)
    assert all(result.codes) and not (tmp_path / "run" / "metrics.jsonl").exists()
    assert result.output.count(said) == 1 and "Traceback" not in result.output, result.output


BROKEN = {
    "no function": ("def other():\n    pass\n", "has no function 'reward'"),
    "does not compile": ("def reward(:\n", "SyntaxError"),
    "other parameters": ("def reward(text):\n    return [0.0]\n", "does not take (prompts, responses, rows)"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_reward_function_that_cannot_be_called_is_refused_before_anything_starts(demo, tmp_path, kind, monkeypatch):
    text, said = BROKEN[kind]
    (tmp_path / "broken_reward.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    result = run_job(arguments(demo, tmp_path, "run", "reward.function=broken_reward:reward"), 4)
    assert result.codes == [2] * 4 and not (tmp_path / "run").exists()
    assert result.output.count("refused") == 1 and said in result.output and "Traceback" not in result.output


REWARDS = {
    "raises": ("def reward(prompts, responses, rows):\n    return 1 / 0\n", "ZeroDivisionError"),
    "too_few": ("def reward(prompts, responses, rows):\n    return [0.0]\n", "1 "),
    "nan": ("def reward(prompts, responses, rows):\n    return [float('nan')] * len(rows)\n", "nan"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_function_that_goes_wrong_is_named(demo, tmp_path, kind, monkeypatch):
    text, said = REWARDS[kind]
    (tmp_path / f"own_{kind}.py").write_text(text)
    monkeypatch.chdir(tmp_path)  # modules are found there
    one = ["{all}.tp=1", "{all}.pp=1", f"reward.function=own_{kind}:reward"]
    result = run_job(arguments(demo, tmp_path, "run", *one), 1)
    assert result.codes == [1], result.output
    (cause,) = [line for line in result.output.splitlines() if FIRST in line]
    assert f"own_{kind}:reward" in cause and said in cause, cause


def test_the_long_matrix_is_complete():
    assert len(SHORT) + len(REST) == 36 and {kind for kind, _, rank in SHORT if rank == 0} == set(KINDS)
    assert len({(kind, place) for kind, place, _ in SHORT}) == 9 and {rank for *_, rank in SHORT} == set(range(4))
