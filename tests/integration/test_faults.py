"""A job that fails ends: within seconds, with a non-zero code, its first cause said once, and no process left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import pytest

from rlhf_megatron.controller.pools import JobEnvironment, LaunchError
from toy_job import MARK, config, launch, nothing_is_left, processes_of, torchrun

FAST = {"call_timeout": 30.0, "heartbeat_timeout": 10.0, "collective_timeout": 30.0}


def failing(how, rank, **kwargs):
    def loop(groups):
        assert groups["toy"].echo(value=1) == 1
        groups["toy"].fail(how=how, rank=rank, **kwargs)
        print("not reached", flush=True)

    return loop


@pytest.mark.parametrize(
    ("how", "rank", "cause"),
    [
        ("raise", 2, "rank 2 (pool main) failed in toy.fail: ValueError: boom 42"),
        ("raise", 0, "rank 0 (pool main) failed in toy.fail: ValueError: boom 42"),
        ("sys.exit", 1, "rank 1 (pool main) failed in toy.fail: SystemExit: 5"),
        ("exit", 1, "rank 1 (pool main) was lost in toy.fail"),
        ("exit", 0, "rank 0 (pool main), which runs the loop, was lost"),
        ("kill", 3, "rank 3 (pool main) was lost in toy.fail"),
        ("kill", 0, "rank 0 (pool main), which runs the loop, was lost"),
    ],
)
def test_a_rank_fails_while_others_wait_in_a_collective(how, rank, cause, tmp_path):
    outcome = launch(4, config(**FAST), failing(how, rank), log_folder=tmp_path)
    outcome.assert_named_once(cause)
    assert outcome.seconds < 15 and all(outcome.codes.values()) and "not reached" not in outcome.output
    (kept,) = (tmp_path / "errors").iterdir()
    assert cause in kept.read_text()
    if how == "raise":
        assert "in misbehave" in outcome.output, "the remote traceback is missing"


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("how", ["hang", "spin"])
def test_a_call_that_takes_too_long_says_where_every_rank_is(how, rank):
    outcome = launch(3, config(**{**FAST, "call_timeout": 2.0}), failing(how, rank))
    outcome.assert_named_once("First cause: toy.fail took longer than cluster.call_timeout=2 s on ranks 0, 1, 2")
    assert all(outcome.codes.values()) and outcome.seconds < 20
    block = outcome.output[outcome.output.index("the job ended with an error"):]
    for other in range(3):
        place = "misbehave" if other == rank else "barrier"
        assert any(f"rank {other}: toy.fail for" in line and place in line for line in block.splitlines()), block


def test_a_stopped_rank_is_lost_after_the_heartbeat_timeout():
    def end_it(pids):
        time.sleep(5)
        os.kill(pids[2], signal.SIGKILL)  # it cannot obey an abort: a launcher kills it in the end

    outcome = launch(3, config(**{**FAST, "heartbeat_timeout": 1.5}), failing("stop", 2), meanwhile=end_it)
    outcome.assert_named_once("rank 2 (pool main) was lost in toy.fail: its process is gone (killed or exited) or was "
                              "silent for 1.5 s")


def test_a_rank_that_dies_between_calls_is_noticed_while_the_loop_computes():
    def loop(groups):
        groups["toy"].fail(how="none", rank=0)
        print("computing", flush=True)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            sum(range(1000))

    def kill(pids):
        time.sleep(2.5)
        os.kill(pids[1], signal.SIGKILL)

    outcome = launch(3, config(**FAST), loop, meanwhile=kill)
    outcome.assert_named_once("rank 1 (pool main) was lost between calls")
    assert "computing" in outcome.output and outcome.seconds < 20


def test_errors_of_the_loop_and_of_values_that_cannot_be_sent():
    def own_error(groups):
        groups["toy"].echo(value=1)
        raise KeyError("my own mistake")

    outcome = launch(2, config(**FAST), own_error)
    outcome.assert_named_once("my own mistake'")
    assert "in own_error" in outcome.output and all(outcome.codes.values())

    def unsendable_result(groups):
        groups["toy"].object()

    outcome = launch(2, config(**FAST), unsendable_result)
    outcome.assert_named_once("PosixPath, which cannot be sent")

    def swallowed(groups):
        try:
            groups["toy"].fail(how="raise", rank=1)
        except RuntimeError:
            raise OSError("the checkpoint was not written") from None

    outcome = launch(2, config(**FAST), swallowed)
    outcome.assert_named_once("rank 1 (pool main) failed in toy.fail: ValueError: boom 42")
    assert "The loop then raised OSError at" in outcome.output


def test_a_failing_build_and_a_rank_that_never_joins():
    cfg = config(**FAST)
    cfg.fail_build = 1
    outcome = launch(2, cfg, lambda groups: 0)
    outcome.assert_named_once("rank 1 (pool main) failed in toy.build: ValueError: no such model")

    def late(rank):
        if rank == 1:
            time.sleep(3.5)

    outcome = launch(2, config(**{**FAST, "collective_timeout": 2.0}), lambda groups: 0, before=late, limit=20)
    assert outcome.output.count(MARK) == 1 and outcome.codes[0], outcome.output
    assert "not connected" in outcome.output


def test_a_signal_ends_the_job_with_one_message():
    def interrupt(pids):
        time.sleep(2)
        for pid in pids.values():
            os.kill(pid, signal.SIGINT)

    outcome = launch(3, config(**FAST), lambda groups: groups["toy"].nap(seconds=30), meanwhile=interrupt)
    assert outcome.output.count(MARK) == 1 and "received SIGINT" in outcome.output and outcome.seconds < 15
    assert all(outcome.codes.values())


def test_two_jobs_on_one_host_at_once():
    def loop(groups):
        assert groups["toy"].echo(value="mine") == "mine"
        groups["toy"].nap(seconds=1.0)

    def second(pids):
        outcome = launch(2, config(**FAST), lambda groups: groups["toy"].nap(seconds=0.3) and None)
        assert set(outcome.codes.values()) == {0}, outcome.output

    assert set(launch(2, config(**FAST), loop, meanwhile=second).codes.values()) == {0}


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = launch(2, config(**{**FAST, "collective_timeout": 1.0}), lambda groups: 0, port=port, limit=30)
    assert f"rank 0 cannot listen on 127.0.0.1:{port}" in outcome.output and all(outcome.codes.values())
    assert outcome.seconds < 30


def test_the_environment_is_checked():
    with pytest.raises(LaunchError, match="missing: WORLD_SIZE, MASTER_PORT"):
        JobEnvironment.read({"RANK": "0", "MASTER_ADDR": "a"})
    with pytest.raises(LaunchError, match="RANK=7 is outside"):
        JobEnvironment.read({"RANK": "7", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    outcome = launch(2, config({"a": 2, "b": 3}), lambda groups: 0)
    assert outcome.output.count("needs 5 ranks but the job has 2") == 1 and set(outcome.codes.values()) == {1}


def finish(job: subprocess.Popen, limit: float = 60.0) -> str:
    try:
        return job.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        for pid in processes_of(job):
            os.kill(pid, signal.SIGKILL)
        raise AssertionError("the job did not end:\n" + job.communicate()[0]) from None


def test_two_jobs_under_torchrun_at_once_one_loses_rank_0_and_one_raises(tmp_path):
    stale = {"RANK": "7", "WORLD_SIZE": "99", "MASTER_PORT": "1", "MASTER_ADDR": "nowhere"}
    killed = torchrun(3, {"fail": ["kill", 0], "folder": str(tmp_path / "a")}, stale)
    raised = torchrun(3, {"fail": ["raise", 2], "folder": str(tmp_path / "b"), "pools": {"main": 3}})
    for job, cause in ((killed, "rank 0 (pool main), which runs the loop, was lost"), (raised, "ValueError: boom 42")):
        output = finish(job)
        assert job.returncode and "world 3" in output and nothing_is_left(job), output
        assert output.count(cause) == 1 and output.count(MARK) == 1, output
        assert cause in "\n".join(output.splitlines()[-50:]), output
        (kept,) = (tmp_path / ("a" if job is killed else "b") / "errors").iterdir()
        assert cause in kept.read_text()


def test_killing_the_agent_or_interrupting_leaves_no_rank(tmp_path):
    jobs = {torchrun(2, {"nap": 60, "folder": str(tmp_path)}): number for number in (signal.SIGKILL, signal.SIGINT)}
    for job in jobs:
        for line in job.stdout:
            if "napping" in line:
                break
    for job, number in jobs.items():
        ranks = processes_of(job)
        assert len(ranks) >= 3
        for pid in [job.pid] if number == signal.SIGKILL else ranks:  # Ctrl-C reaches every process of the terminal
            os.kill(pid, number)
        assert nothing_is_left(job), f"processes are left after {number.name}"
        job.stdout.close()
        assert job.wait() != 0
