"""A job without models: toy workers, a fake config, and a launcher that forks the ranks (no interpreter starts).

Also runs under a real launcher: `torchrun ... tests/toy_job.py '{"fail": ["kill", 0]}'`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from rlhf_megatron.controller.transports import transport  # noqa: E402
from rlhf_megatron.data.proto import DataProto, Ragged  # noqa: E402
from rlhf_megatron.observe.metrics import Max, Mean  # noqa: E402
from rlhf_megatron.workers.base import Worker, method  # noqa: E402

MARK = "First cause:"


class Toy(Worker):
    """Methods with one simple thing each."""

    def __init__(self, role: str, config: Any, context: Any) -> None:
        super().__init__(role, config, context)
        if config.fail_build == context.job_rank:
            raise ValueError("no such model")

    @method(reads=("prompts", "row_id"), optional=("responses",), returns=("sums", "tag"), split="train")
    def sums(self, batch: DataProto, extra: int = 0) -> tuple[DataProto, dict] | None:
        """Sum of each row's tokens + extra; every rank of the replica must hold the same rows."""
        mine = torch.tensor([float(row.sum()) for row in batch["prompts"]])
        group = self.replica_group("train")
        if group is not None:
            total = mine.clone()
            dist.all_reduce(total, group=group)
            assert torch.equal(total, mine * len(self.replica("train").ranks)), "the replica's ranks differ"
        if self.context.rank != self.replica("train").output:
            return None
        out = DataProto(
            {"sums": mine + extra, "unasked": mine},
            {"tag": [f"{i}@{self.context.pool}" for i in batch["row_id"]]},
            {"left": "behind"},
        )
        return out, {"toy/rows": Mean(len(batch), 1), "toy/replicas": Mean(1, 1), "toy/max": Max(float(mine.max()))}

    @method(reads=("prompts",), split="generate")
    def count(self, batch: DataProto) -> dict:
        return {"toy/rows": Mean(len(batch), 1)}

    @method(reads=("prompts",), optional=("response_mask",), split="train")
    def valid(self, batch: DataProto) -> dict:
        if self.context.rank == 1 and self.config.print_masks:
            print("valid tokens here:", int(batch["response_mask"].values.sum()), flush=True)
        return {"toy/valid": Mean(float(batch["response_mask"].values.sum()), 1)}

    @method()
    def place(self) -> dict:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        return {"world": dist.get_world_size(), "rank": dist.get_rank(), "pool": self.context.pool,
                "job_rank": self.context.job_rank, "env": [os.environ.get(name) for name in names]}

    @method()
    def echo(self, value: Any) -> Any:
        return value

    @method()
    def nap(self, seconds: float) -> tuple[float, float]:
        start = time.monotonic()
        time.sleep(seconds)
        return start, time.monotonic()

    @method()
    def object(self) -> Any:
        return Path("x")

    @method()
    def fail(self, how: str, rank: int, collective: bool = True) -> None:
        """Rank `rank` fails; the others wait for it in a collective."""
        if self.context.job_rank == rank:
            misbehave(how)
        if collective:
            dist.barrier()


def misbehave(how: str) -> None:
    if how == "raise":
        raise ValueError("boom 42")
    if how == "sys.exit":
        sys.exit(5)
    if how == "exit":
        os._exit(1)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "hang":
        time.sleep(3600)
    if how == "spin":  # blocked in Python for ever, but not asleep
        while True:
            pass


def config(
    pools: dict[str, int] | None = None, *, tp: int = 1, pp: int = 1, generation_tp: int = 1, **cluster: Any
) -> Any:
    """What the control plane reads of a config. Roles `toy` (first pool) and `other` (last pool)."""
    pools = pools or {"main": 0}
    defaults = {"call_timeout": 60.0, "heartbeat_timeout": 10.0, "collective_timeout": 60.0}
    role = {"parallel": SimpleNamespace(tp=tp, pp=pp, cp=1)}
    return SimpleNamespace(
        cluster=SimpleNamespace(pools=pools, **{**defaults, **cluster}),
        generation=SimpleNamespace(tp=generation_tp),
        trainer=SimpleNamespace(seed=3),
        toy=SimpleNamespace(pool=next(iter(pools)), **role),
        other=SimpleNamespace(pool=list(pools)[-1], **role),
        fail_build=None,
        print_masks=False,
    )


def batch(lengths: list[int]) -> DataProto:
    rows = [[100 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    prompts = Ragged.from_list(rows, dtype=torch.int64)
    return DataProto({"prompts": prompts}, {"row_id": list(range(len(rows)))}, {"m": 1.5})


def sums_of(data: DataProto) -> list[float]:
    return [float(sum(row)) for row in data["prompts"].to_list()]


@dataclass
class Outcome:
    codes: dict[int, int]
    output: str
    seconds: float

    def assert_named_once(self, text: str) -> None:
        assert self.output.count(MARK) == 1, self.output
        assert self.output.count(text) == 1, self.output
        assert text in "\n".join(self.output.splitlines()[-50:]), self.output


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def launch(
    n: int, cfg: Any, loop: Callable[[dict], int | None], *, roles: tuple[str, ...] = ("toy",), port: int = 0,
    log_folder: Path | None = None, before: Callable[[int], None] = lambda rank: None, limit: float = 40.0,
    meanwhile: Callable[[dict[int, int]], None] = lambda pids: None,
) -> Outcome:
    """Fork n ranks that run the job; wait for all of them. Fails the test when one is left after `limit` seconds."""
    port = port or free_port()
    scratch = tempfile.TemporaryDirectory(prefix="toy-job-")
    output = Path(scratch.name) / "output.txt"
    output.touch()
    pids: dict[int, int] = {}
    start = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            _rank(rank, n, port, output, cfg, loop, roles, log_folder, before)
        pids[rank] = pid
    codes: dict[int, int] = {}
    try:
        meanwhile(pids)
        while len(codes) < n and time.monotonic() - start < limit:
            for rank in set(pids) - set(codes):
                done, status = os.waitpid(pids[rank], os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
    finally:
        seconds = time.monotonic() - start
        for rank in set(pids) - set(codes):
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
    text = output.read_text()
    scratch.cleanup()
    assert len(codes) == n, f"ranks {sorted(set(pids) - set(codes))} were left after {limit} s\n{text}"
    return Outcome(codes, text, seconds)


def _rank(
    rank: int, n: int, port: int, output: Path, cfg: Any, loop: Any, roles: Any, folder: Any, before: Any
) -> None:
    code = 1
    try:
        handle = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        tempfile.tempdir = str(output.parent)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
            del os.environ[name]
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        before(rank)
        code = transport("torchrun").run(cfg, dict.fromkeys(roles, Toy), loop, log_folder=folder)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def torchrun(n: int, plan: dict, environment: dict[str, str] | None = None) -> subprocess.Popen:
    """Start this file under a real torchrun; output (both streams) in a pipe."""
    token = os.urandom(8).hex()
    options = ["--nproc-per-node", str(n), "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, json.dumps(plan), token]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                            env={**os.environ, **(environment or {}), "TOY_JOB": token}, start_new_session=True)


def processes_of(job: subprocess.Popen) -> list[int]:
    """Living processes that the job's launcher started, itself included, in whatever process group."""
    token, found = f"TOY_JOB={job.args[-1]}".encode(), []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and token in (folder / "environ").read_bytes().split(b"\0"):
                if (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(folder.name))
        except OSError:
            pass  # ended meanwhile, or not ours
    return found


def nothing_is_left(job: subprocess.Popen, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while processes_of(job):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def main() -> int:
    """Under a launcher. The plan: pools, fail [how, rank], nap seconds, folder."""
    plan = json.loads(sys.argv[1])

    def loop(groups: dict) -> int:
        data = batch([3, 1, 2, 5])
        out, _ = groups["toy"].sums(data)
        assert out["sums"].tolist() == sums_of(data)
        print("world", groups["toy"].place()["world"], flush=True)
        if "fail" in plan:
            groups["toy"].fail(how=plan["fail"][0], rank=plan["fail"][1])
        if "nap" in plan:
            print("napping", flush=True)
            groups["toy"].nap(seconds=plan["nap"])
        print("finished", flush=True)
        return 0

    return transport("torchrun").run(config(plan.get("pools"), **plan.get("cluster", {})), {"toy": Toy}, loop,
                                     log_folder=plan.get("folder"))


if __name__ == "__main__":
    sys.exit(main())
