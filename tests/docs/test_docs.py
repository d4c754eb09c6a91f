"""What README, CONTRIBUTING and the launch guide show is what happens: their commands are run, their links followed."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_megatron import cli
from rlhf_megatron.config import checks
from rlhf_megatron.config.load import load_config
from rlhf_megatron.layouts.hf import HFLayout, read_spec
from rlhf_megatron.layouts.spec import ParallelLayout

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in ROOT.rglob("*.md")
               if not {".venv", "build", "runs", ".pytest_cache"} & set(path.relative_to(ROOT).parts))
BIN = Path(sys.executable).parent
SHORT = ["trainer.steps=1", "trainer.save_hf=never", "trainer.prompts_per_step=8", "trainer.mini_batch_size=64",
         *(f"{role}.micro_batch_size=8" for role in ("actor", "critic", "reference"))]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language ("" for those without one)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    return [text for name, text in fenced if name == language]


def commands() -> list[str]:
    """Every command of a bash block, without its comment."""
    lines = [line for page in PAGES for block in blocks(page, "bash")
             for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return sorted({line for line in found if line})


@pytest.fixture(scope="module")
def demo_folder() -> None:
    """build/demo, as `make demo` makes it."""
    from examples.make_demo_model import make

    if not (ROOT / "build" / "demo" / "model" / "config.json").is_file():
        make(ROOT / "build" / "demo")


def shell(words: list[str], timeout: float = 120) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "TORCHELASTIC"))}
    environment |= {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_commands_are_found():
    assert {"make demo", "make test"} <= set(commands()) and len(commands()) > 10


@pytest.mark.timeout(180)
@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_command_of_the_documents_works(command, demo_folder, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":  # their recipes are long; that they exist and take their arguments is looked at
        assert shell([*words, "--dry-run"])
        return
    words[0] = words[0].replace(".venv/bin/", f"{BIN}/")
    if "rlhf_megatron.train" in words:
        shell([*words, *SHORT, f"run.folder={tmp_path}"])
        assert (tmp_path / "demo" / "metrics.jsonl").read_text().count("\n") == 1
    elif "check" in words or "--dry-run" in words:
        assert shell(words)
    else:
        pytest.fail(f"no rule for {command!r}: say here how it is tested")


def forms(page: Path) -> list[str]:
    """The commands that a page names inside its text, with their placeholders filled in."""
    spans = re.findall(r"`((?:rlhf-megatron|launch/torchrun\.sh) [^`]+)`", page.read_text(encoding="utf-8"))
    spans = [re.sub(r"\[[^]]*]", "", span).replace("HOST:PORT", "localhost:29500") for span in spans]
    return [re.sub(r"\bR\b", "0", span).replace("CONFIG", "yaml_configs/demo_ppo_cpu.yaml") for span in spans]


@pytest.mark.parametrize("form", forms(ROOT / "launch" / "README.md"))
def test_a_form_of_the_launch_guide_is_accepted(form, demo_folder):
    tool, *words = shlex.split(form)
    if tool == "rlhf-megatron":  # nothing is started: `check` takes the arguments of `train`
        assert words[0] in ("check", "train") and "OK" in shell([f"{BIN}/{tool}", "check", *words[1:]])
    else:  # the number of ranks is the number of GPUs, of which there are none here
        assert "rlhf_megatron.train" in shell([tool, "--dry-run", "--ranks-per-node", "4", *words])


def test_the_options_of_the_launch_guide_exist():
    sources = [*(ROOT / "launch").glob("*.s*"), ROOT / "rlhf_megatron" / "cli.py"]
    known = {name for path in sources for name in re.findall(r"--[a-z][a-z-]+", path.read_text(encoding="utf-8"))}
    named = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "launch" / "README.md").read_text(encoding="utf-8")))
    assert len(named) > 8 and named <= known, named - known


def test_the_benchmarks_are_named_in_their_readme():
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[([^]]+)\]", text, re.M)
    assert sorted(named) == sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))


def test_the_reward_example_of_the_readme_is_a_reward(demo_folder, tmp_path, monkeypatch):
    (code,) = blocks(ROOT / "README.md", "python")
    (tmp_path / "readme_reward.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = '{"prompt": "ab:", "answer": "\\u0000"}\n' * 8  # a character that turns up now and then
    (tmp_path / "rows.jsonl").write_text(rows)
    shell([sys.executable, "-m", "rlhf_megatron.train", "yaml_configs/demo_ppo_cpu.yaml", "--single", *SHORT,
           f"run.folder={tmp_path}", f"data.train={tmp_path}/rows.jsonl", "reward.function=readme_reward:my_reward"])
    assert '"reward/mean"' in (tmp_path / "demo" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_tree_of_the_readme_is_the_tree():
    (tree,) = [block for block in blocks(ROOT / "README.md", "") if "rlhf_megatron/\n" in block]
    inside = [name for line in tree.splitlines() if line.startswith("  ")
              for name in re.findall(r"[\w./]+", line.strip().partition("  ")[0])]
    beside = [name for line in tree.splitlines() if not line.startswith("  ")
              for name in re.findall(r"[\w./]+/", line.partition("  ")[0] if "  " in line else line)]
    assert all((ROOT / "rlhf_megatron" / name).exists() for name in inside)
    assert all((ROOT / name).is_dir() for name in beside)
    packages = {path.parent.name for path in (ROOT / "rlhf_megatron").glob("*/__init__.py")}
    assert packages == {name.rstrip("/") for name in inside if name.endswith("/")}


RANKS = {  # the ranks that the file's own comment names
    "demo_ppo_cpu.yaml": [(4, [])],
    "smollm2_135m_sums_grpo_cpu.yaml": [(4, [])],
    "smollm2_135m_gsm8k_grpo_cpu.yaml": [(4, []), (3, ["actor.parallel.tp=3", "actor.parallel.pp=1"])],
}


# Published shapes of the models that are too large to be here: config.json without weights is all that `check` reads.
SHARED = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 128256,
          "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None,
          "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128009,
          "torch_dtype": "bfloat16"}
LLAMA3_8B = SHARED | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
                      "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA3_70B = SHARED | {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
                       "num_attention_heads": 64, "num_key_value_heads": 8}
CLUSTER = {  # config -> the model's shape, the ranks that its name says (eight to a node), the actor's layout
    "llama3_8b_grpo_8gpus.yaml": (LLAMA3_8B, 8, "TP4 PP1 DP2"),
    "llama3_8b_ppo_8gpus.yaml": (LLAMA3_8B, 8, "TP8 PP1 DP1"),
    "llama3_70b_grpo_64gpus.yaml": (LLAMA3_70B, 64, "TP8 PP4 DP2"),
    "llama3_70b_ppo_64gpus.yaml": (LLAMA3_70B, 64, "TP8 PP4 DP2"),
}


def test_every_config_is_listed():
    assert set(RANKS | CLUSTER) == {path.name for path in (ROOT / "yaml_configs").iterdir()}


@pytest.mark.parametrize("name", CLUSTER)
def test_a_config_of_a_cluster_passes_its_checks_with_the_model_s_true_shape(name, tmp_path, monkeypatch, capsys):
    shape, ranks, layout = CLUSTER[name]
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text(json.dumps(shape))
    path = f"yaml_configs/{name}"
    words = ["check", path, "--gpus", "8", "--ranks-per-node", "8", f"actor.model={tmp_path}"]
    assert cli.main([*words, "--ranks", str(ranks)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert layout in said and f"{ranks} ranks" in said and "cuda, bfloat16" in said
    config = load_config(path, [f"actor.model={tmp_path}"])
    spec, parallel = read_spec(tmp_path), config.actor.parallel
    assert spec.head_dim == 128
    found = ParallelLayout.build(ranks, parallel.tp, parallel.pp)
    assert found.validate(spec) == [] and str(found) == layout.replace("DP", "CP1 DP")
    # without the model's folder one message says which key to set
    assert cli.main([word for word in words if "actor.model" not in word] + ["--ranks", str(ranks)]) == 2
    assert "actor.model: models/llama3_" in capsys.readouterr().err
    text = (ROOT / path).read_text()
    assert text.startswith("# ") and "actor.model=FOLDER" in text
    # an engine that holds a whole copy on every rank cannot hold 70B: the file has to say so
    weights = 2 * sum(math.prod(size) for size in HFLayout(spec).canonical_shapes().values())
    assert ("CANNOT GENERATE YET" in text) == (weights > 80e9)


@pytest.mark.parametrize("name", RANKS)
def test_a_config_passes_its_checks(name, demo_folder, smollm2, monkeypatch):
    from examples.make_sums_data import write

    monkeypatch.chdir(ROOT)
    write(ROOT / "build" / "sums")
    path = ROOT / "yaml_configs" / name
    assert path.read_text().startswith("# ")
    for ranks, overrides in RANKS[name]:
        assert checks.check(load_config(str(path), overrides), ranks) == []
        single, _ = checks.single(load_config(str(path)))
        assert checks.check(single, 1) == []
