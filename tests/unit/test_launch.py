"""The launch scripts: what they would start, what they refuse, and that exit codes come through. Nothing real is
started: torchrun, srun and scontrol are small fakes on PATH, Slurm is a set of variables."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from test_config_load import BASE

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN, SLURM = ROOT / "launch" / "torchrun.sh", ROOT / "launch" / "slurm.sbatch"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a config that fits, and a bin/ whose torchrun says how it was called and ends with 7."""
    (tmp_path / "run.yaml").write_text(BASE)
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    tool(tmp_path, "torchrun", 'echo "torchrun $*; OMP=$OMP_NUM_THREADS RANK=${RANK-none}"; exit 7')
    return tmp_path


def tool(place: Path, name: str, body: str) -> None:
    file = place / "bin" / name
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)


def call(place: Path, script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PET_", "OMP"))}
    env |= {"PATH": f"{place / 'bin'}:{env['PATH']}", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(["bash", str(script), *words], cwd=place, env=env, capture_output=True, text=True, timeout=60)


def slurm(**more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "16001", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_GPUS_ON_NODE": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9", "RLHF_MEGATRON_HOME": str(ROOT), **more}


@pytest.mark.parametrize("script", [TORCHRUN, SLURM], ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    binary = Path(sys.executable).parent / "shellcheck"
    found = str(binary) if binary.exists() else shutil.which("shellcheck")
    if not found:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([found, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_dry_run_on_one_node(place: Path) -> None:
    done = call(place, TORCHRUN, "--dry-run", "--ranks-per-node", "4", "run.yaml", "trainer.steps=3", "data.system=a b")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    start = words.index("torchrun")
    assert words[start:] == ["torchrun", "--nnodes=1", "--nproc-per-node=4", "--standalone", "-m",
                             "rlhf_megatron.train", "run.yaml", "trainer.steps=3", "data.system=a b"]
    assert {"OMP_NUM_THREADS=1", "CUDA_DEVICE_MAX_CONNECTIONS=1"} < set(words[:start])


def test_dry_run_of_one_node_of_two(place: Path) -> None:
    done = call(place, TORCHRUN, "--dry-run", "--nodes", "2", "--node-rank", "1", "--master", "host:2345",
                "--ranks-per-node", "2", "--logs", "logs", "run.yaml")
    words = shlex.split(done.stdout)
    assert words[words.index("torchrun"):] == [
        "torchrun", "--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--master-addr=host", "--master-port=2345",
        "--log-dir=logs/node_1", "--tee=3", "-m", "rlhf_megatron.train", "run.yaml"]


def test_the_exit_code_comes_through_and_stale_variables_do_not(place: Path) -> None:
    done = call(place, TORCHRUN, "--ranks-per-node", "2", "run.yaml", RANK="5", MASTER_ADDR="gone", PET_NNODES="9")
    assert done.returncode == 7 and "OMP=1 RANK=none" in done.stdout
    for name in ("RANK=5", "MASTER_ADDR=gone", "PET_NNODES=9"):
        assert f"ignoring {name}" in done.stderr


@pytest.mark.parametrize(("words", "said"), [
    ([], "no CONFIG"),
    (["run.yaml"], "0 ranks: this node has no GPU that can be seen; say --ranks-per-node"),
    (["--ranks-per-node", "x", "run.yaml"], "--ranks-per-node x: expected a whole number"),
    (["--ranks-per-node"], "needs a value"),
    (["--nproc", "2", "run.yaml"], "unknown option --nproc"),
    (["--nodes", "2", "--ranks-per-node", "2", "run.yaml"], "2 nodes need --master HOST:PORT"),
    (["--nodes", "2", "--node-rank", "2", "--ranks-per-node", "2", "run.yaml"], "2 nodes are numbered 0 to 1"),
    (["--nodes", "2", "--master", "h:99999", "--ranks-per-node", "2", "run.yaml"], "at most 65535"),
    (["--ranks-per-node", "3", "run.yaml", "actor.parallel.tp=2"], "tp(2) x pp(1) does not divide pool size(3)"),
    (["--ranks-per-node", "2", "run.yaml", "trainer.stepz=2"], "did you mean trainer.steps?"),
])
def test_what_is_refused_starts_nothing(place: Path, words: list[str], said: str) -> None:
    done = call(place, TORCHRUN, *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and said in done.stderr and "torchrun --" not in done.stdout


def test_a_port_in_use_is_named(place: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = call(place, TORCHRUN, "--nodes", "2", "--master", f"localhost:{port}", "--ranks-per-node", "2",
                    "run.yaml", "actor.micro_batch_size=1")
    assert done.returncode == 2 and f"port {port} of localhost is in use" in done.stderr


def test_slurm_dry_run_names_the_first_node(place: Path) -> None:
    tool(place, "scontrol", '[[ "$*" == "show hostnames n[1-2]" ]] && printf "localhost\\nn2\\n"')
    done = call(place, SLURM, "--dry-run", "run.yaml", "trainer.steps=3", **slurm(SLURM_CPUS_PER_TASK="8"))
    assert done.returncode == 0, done.stderr
    srun, *nodes = done.stdout.splitlines()
    words = shlex.split(srun)
    assert words[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"] and "--cpus-per-task=8" in words
    for rank, line in enumerate(nodes):
        assert line.startswith(f"node {rank}: env ") and line.rstrip().endswith(
            f"torchrun --nnodes=2 --nproc-per-node=2 --node-rank={rank} --master-addr=localhost --master-port=16001 "
            f"--log-dir=runs/logs/slurm_16001/node_{rank} --tee=3 -m rlhf_megatron.train run.yaml trainer.steps=3")
    assert len(nodes) == 2


@pytest.mark.parametrize("scontrol", ["exit 1", 'printf "n1.does-not-resolve.invalid\\n"'])
def test_slurm_falls_back_to_the_launch_nodes_address(place: Path, scontrol: str) -> None:
    tool(place, "scontrol", scontrol)
    done = call(place, SLURM, "--dry-run", "run.yaml", **slurm(RDZV_PORT="4000", RANKS_PER_NODE="3"))
    assert done.stdout.count("--nproc-per-node=3") == 2
    assert done.stdout.count("--master-addr=10.0.0.9 --master-port=4000") == 2


def test_slurm_starts_one_torchrun_per_node_and_passes_the_code(place: Path) -> None:
    """A fake srun runs the task once per node, one after the other, as the real one would on each."""
    tool(place, "scontrol", "exit 1")
    tool(place, "srun", 'while [[ $1 == -* ]]; do shift; done; code=0\n'
                        'for n in 0 1; do SLURM_NODEID=$n "$@" || code=$?; done; exit "$((code ? 137 : 0))"')
    done = call(place, SLURM, "run.yaml", "actor.micro_batch_size=1", "data.system=a b", **slurm())
    assert done.returncode == 7, done.stderr  # the first node's, not the 137 of an srun that had to kill the rest
    assert "node 0 failed first, with code 7" in done.stderr
    started = [line for line in done.stdout.splitlines() if line.startswith("torchrun --")]
    assert [f"--node-rank={rank} --master-addr=10.0.0.9" in line for rank, line in enumerate(started)] == [True, True]
    assert all("run.yaml actor.micro_batch_size=1 data.system=a b; OMP=1" in line for line in started)
    assert "DP4" in done.stdout  # the check's summary, once, at the top of the log
    assert done.stdout.count("DP4") == 1


@pytest.mark.parametrize(("words", "variables", "said"), [
    (["run.yaml"], {"SLURM_JOB_ID": ""}, "not inside a Slurm job"),
    ([], {}, "usage: sbatch"),
    (["run.yaml"], {"SLURM_GPUS_ON_NODE": ""}, "set RANKS_PER_NODE"),
    (["run.yaml"], {"RLHF_MEGATRON_HOME": "/nowhere"}, "/nowhere/launch/torchrun.sh is not there"),
    (["run.yaml", "generation.tp=2"], {}, "generation.tp: is 2"),
])
def test_slurm_refuses_before_srun(place: Path, words: list[str], variables: dict[str, str], said: str) -> None:
    tool(place, "scontrol", "exit 1")
    tool(place, "srun", "echo started")
    done = call(place, SLURM, *words, **slurm(**variables))
    assert done.returncode == 2 and said in done.stderr and "started" not in done.stdout
