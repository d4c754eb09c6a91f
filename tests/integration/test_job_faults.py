"""The real job on four ranks (TP2 x PP2, real Megatron workers) when a rank, a reward or a number goes wrong."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from jobs import JobResult, arguments, metrics, run_job, run_loop, succeeded
from rlhf_megatron.train import loop as train_loop
from rlhf_megatron.workers.actor import ActorWorker
from rlhf_megatron.workers.critic import CriticWorker

FIRST = "First cause:"
KINDS = ("raise", "exit", "kill")
GENERATION, UPDATE = ("reshard", "generate"), ("forward", "backward")
SHORT = [  # every kind in generation and in the update, every rank, rank 0 with every kind
    ("raise", "reshard", 1), ("raise", "generate", 0), ("raise", "backward", 3),
    ("exit", "reshard", 0), ("exit", "generate", 2), ("exit", "forward", 1),
    ("kill", "reshard", 2), ("kill", "generate", 3), ("kill", "backward", 0),
]
REST = [(kind, place, rank) for kind in KINDS for place in GENERATION + UPDATE for rank in range(4)
        if (kind, place, rank) not in SHORT]


def failing_actor(kind: str, place: str, rank: int, mark: Path) -> type[ActorWorker]:
    """An actor of which one rank fails in its second step, in the middle of what the other ranks take part in.

    The time at which it does is written to the file `mark`.
    """

    class FailingActor(ActorWorker):
        step = calls = 0

        def fail(self, *_: object) -> None:
            self.calls += self.step == 2
            if self.context.rank != rank or self.calls < (2 if place in UPDATE else 1):
                return
            mark.write_text(str(time.time()))
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
            if self.step == 2:  # in the pipeline's schedule, between its sends and receives: the second micro-batch
                decoder = self.engine.model.decoder
                if place == "forward":
                    decoder.register_forward_pre_hook(self.fail)
                if place == "backward":
                    decoder.register_forward_hook(lambda _, given, made: made.register_hook(self.fail) and None)
            return super().update(batch)

    return FailingActor


def ended_well(result: JobResult, runs: Path, cause: str, codes: list[int], finished: list[int]) -> None:
    """The job ended with these exit codes, its first cause said once, where a user sees it, and kept; no process left;
    the log holds whole lines, of the finished steps."""
    assert not result.timed_out and result.codes == codes and result.left_behind == 0, (result.codes, result.output)
    assert result.output.count(FIRST) == 1 and result.output.count(cause) == 1, result.output
    assert cause in "\n".join(result.output.splitlines()[-50:]), result.output
    (kept,) = (runs / "run" / "errors").iterdir()
    assert cause in kept.read_text()
    log = runs / "run" / "metrics.jsonl"
    assert log.read_text()[-1:] in ("", "\n") and [line["step"] for line in metrics(runs, "run")] == finished


def check_fault(demo, runs, kind, place, rank, record_property):
    mark = runs / "failed_at"
    result = run_loop(arguments(demo, runs, "run"), 4, train_loop, timeout=100,
                      workers={"actor": failing_actor(kind, place, rank, mark)})
    seconds = time.time() - float(mark.read_text())
    record_property("seconds", f"{seconds:.2f}")
    assert seconds < 60
    called = "actor.generate" if place in GENERATION else "actor.update"
    cause = {"raise": f"rank {rank} (pool main) failed in {called}: ValueError: planted 42"}.get(
        kind, "rank 0 (pool main), which runs the loop, was lost" if rank == 0
        else f"rank {rank} (pool main) was lost in {called}")
    codes = [-signal.SIGKILL if kind == "kill" and other == rank else 1 for other in range(4)]
    ended_well(result, runs, cause, codes, finished=[1])
    if kind == "raise":
        assert "in fail\n" in result.output, "the traceback of the rank is missing"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "place", "rank"), SHORT)
def test_a_rank_fails_in_a_real_step(demo, tmp_path, kind, place, rank, record_property):
    check_fault(demo, tmp_path, kind, place, rank, record_property)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "place", "rank"), REST)
def test_any_rank_fails_anywhere(demo, tmp_path, kind, place, rank, record_property):
    check_fault(demo, tmp_path, kind, place, rank, record_property)


@pytest.mark.timeout(240)
def test_a_rank_killed_while_a_checkpoint_is_written_leaves_the_one_before(demo, tmp_path):
    class Dies(CriticWorker):
        def save(self, directory):
            if self.context.rank == 2 and "step_000002" in directory:
                os.kill(os.getpid(), signal.SIGKILL)
            super().save(directory)

    saving = ["trainer.save_every=1", "trainer.keep=0"]
    result = run_loop(arguments(demo, tmp_path, "run", *saving), 4, train_loop, workers={"critic": Dies})
    ended_well(result, tmp_path, "rank 2 (pool main) was lost in critic.save", [1, 1, -signal.SIGKILL, 1], [1, 2])
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "latest").read_text() == "step_000001"
    assert [path.name for path in checkpoints.glob("step_*")] == ["step_000001"]
    before = metrics(tmp_path, "run")
    resumed = run_job(arguments(demo, tmp_path, "run", *saving, "trainer.resume=auto"), 4)
    succeeded(resumed)
    after = metrics(tmp_path, "run")
    assert "continuing at step 2" in resumed.output and [line["step"] for line in after] == [1, 2, 3]
    for name in ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "kl/ref"):
        assert after[1][name] == before[1][name], name
    assert not list(checkpoints.glob(".writing*")) and (checkpoints / "latest").read_text() == "step_000003"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_interrupt_ends_a_real_step(demo, tmp_path, ranks):
    """Ctrl-C reaches every rank at once; here in the update of step 2, while ranks wait for the last one."""
    mark, sent = tmp_path / "waits", []

    class Waits(ActorWorker):
        step = 0

        def generate(self, batch, step, greedy=False):
            self.step = step
            return super().generate(batch, step=step, greedy=greedy)

        def update(self, batch):
            if self.step == 2 and self.context.rank == ranks - 1:
                self.engine.model.decoder.register_forward_pre_hook(lambda *_: (mark.touch(), time.sleep(60))[:0])
            return super().update(batch)

    def interrupt(pids):
        end = time.monotonic() + 100
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.3)
        sent.append(time.monotonic())
        for pid in pids:
            os.kill(pid, signal.SIGINT)

    layout = ["--single"] if ranks == 1 else []
    result = run_loop(arguments(demo, tmp_path, "run", *layout), ranks, train_loop, workers={"actor": Waits},
                      meanwhile=interrupt)
    assert time.monotonic() - sent[0] < 20 and mark.exists()
    assert result.output.count("Traceback") <= 1, result.output
    if ranks == 1:
        assert result.codes != [0] and result.output.rstrip().endswith("KeyboardInterrupt"), result.output
    else:
        ended_well(result, tmp_path, "received SIGINT: the launcher or a user ended the job", [1] * 4, [1])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ranks", "layout"), [(1, ["--single"]), (4, []), (4, ["{all}.pp=1"])],
                         ids=["one process", "tp2pp2", "tp2dp2"])
def test_a_nan_log_prob_on_a_valid_token_skips_the_updates_and_says_so(demo, tmp_path, ranks, layout):
    """One rollout of step 2 is spoilt: no weight moves in that step, the user is told, step 3 trains as usual."""

    class Poisoned(ActorWorker):
        step = 0

        def generate(self, batch, step, greedy=False):
            self.step = step
            return super().generate(batch, step=step, greedy=greedy)

        def log_probs(self, batch):
            scored = super().log_probs(batch)
            if scored is not None and self.step == 2 and self.engine.coordinates.dp == 0:
                scored["old_log_probs"].values[0] = torch.nan
            return scored

    def loop(config, groups):
        actor, critic, moved = groups["actor"], groups["critic"], {"actor": [], "critic": []}
        start_actor, start_critic = actor.start, critic.start

        def watch_actor(method, *batch, **more):
            future = start_actor(method, *batch, **more)
            if method == "update":
                moved["actor"].append(actor.verify_generation_weights() != [])  # the generation copy is of before
            return future

        def watch_critic(method, *batch, **more):
            before = critic.values(*batch)["values"].values if method == "update" else None
            future = start_critic(method, *batch, **more)
            if method == "update":
                moved["critic"].append(not torch.equal(before, critic.values(*batch)["values"].values))
            return future

        actor.start, critic.start = watch_actor, watch_critic
        code = train_loop(config, groups)
        print("moved:", moved)
        return code

    result = run_loop(arguments(demo, tmp_path, "run", *layout, "trainer.mini_batch_size=32"), ranks, loop,
                      workers={"actor": Poisoned})
    succeeded(result)
    assert "moved: {'actor': [True, False, True], 'critic': [True, False, True]}" in result.output
    lines = metrics(tmp_path, "run")
    for role in ("actor", "critic"):
        assert result.output.count(f"warning: step 2: {role}/skipped 1: the gradient") == 1, result.output
        assert [line[f"{role}/skipped"] for line in lines] == [0, 1, 0]
        assert [f"{role}/grad_norm" in line for line in lines] == [True, False, True]
    assert "warning: step 1" not in result.output and "warning: step 3" not in result.output
    assert ["not_finite" in line for line in lines] == [False, True, False]


@pytest.mark.timeout(120)
def test_a_nan_of_the_sampler_is_said(demo, tmp_path):
    class Poisoned(ActorWorker):
        def generate(self, batch, step, greedy=False):
            out, report = super().generate(batch, step=step, greedy=greedy)
            if step == 2:
                out["rollout_log_probs"].values[0] = torch.nan
            return out, report

    result = run_loop(arguments(demo, tmp_path, "run", "--single"), 1, train_loop, workers={"actor": Poisoned})
    succeeded(result)
    (said,) = [line for line in result.output.splitlines() if line.startswith("warning")]
    assert said.startswith("warning: step 2: not a finite number: rollout/log_prob_gap = nan"), said
    assert [line["actor/skipped"] for line in metrics(tmp_path, "run")] == [0, 0, 0]  # this loss does not read it


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


SPOILT = """
calls, bad = 0, None

def reward(prompts, responses, rows):
    '''Fails on row 5 of the second step, also when that row comes alone.'''
    global calls, bad
    calls += 1
    if calls == 2:
        bad = prompts[5], responses[5]
    if bad in zip(prompts, responses):
        raise ValueError("no answer here")
    return [0.5] * len(rows)
"""
REWARDS = {  # the function, what is said of it, finished steps
    "raises": (SPOILT, "fails on row 5: ValueError: no answer here", [1]),
    "too_few": ("def reward(prompts, responses, rows):\n    return [0.0]\n", "gives 1 rewards for 32 rows", []),
    "nan": ("def reward(prompts, responses, rows):\n    return [0.5] * 7 + [float('nan')] * (len(rows) - 7)\n",
            "row 7: reward is nan, which must be finite", []),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_function_that_goes_wrong_is_named(demo, tmp_path, kind, ranks, monkeypatch):
    text, said, finished = REWARDS[kind]
    (tmp_path / f"own_{kind}.py").write_text(text)
    monkeypatch.chdir(tmp_path)  # modules are found there
    layout = ["--single"] if ranks == 1 else []
    result = run_job(arguments(demo, tmp_path, "run", *layout, f"reward.function=own_{kind}:reward"), ranks)
    (cause,) = [line for line in result.output.splitlines() if said in line]
    assert f"own_{kind}:reward" in cause
    assert ("Traceback" in result.output) == (kind == "raises"), result.output
    assert kind != "raises" or f"own_{kind}.py\", line" in result.output  # where in the user's function
    if ranks == 1:
        assert result.codes == [1] and [line["step"] for line in metrics(tmp_path, "run")] == finished
    else:
        ended_well(result, tmp_path, said, [1] * 4, finished)
        for rank in range(4):
            assert f"  rank {rank}: idle after actor.generate" in result.output


def test_the_matrix_is_complete():
    assert len(SHORT) + len(REST) == 48 and {kind for kind, _, rank in SHORT if rank == 0} == set(KINDS)
    assert len({(kind, place in UPDATE) for kind, place, _ in SHORT}) == 6 and {r for *_, r in SHORT} == set(range(4))
