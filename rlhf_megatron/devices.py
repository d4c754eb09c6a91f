"""The only file that knows CPU/gloo from CUDA/NCCL: device, backend, dtype, memory.

`choose` decides once per process; everything else asks here.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

import torch

CHOICES = ("auto", "cpu", "cuda")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Dense bf16 matrix products, 10^12 operations a second of one GPU, from the vendor's data sheets (which print twice as
# much "with sparsity"). The first words found in the device's name count, so special forms stand before the general.
PEAK_BF16_TFLOPS = (
    ("H100 PCIe", 756.5), ("H100 NVL", 835.5), ("H200 NVL", 835.5), ("H100", 989.4), ("H200", 989.4), ("GH200", 989.4),
    ("H800", 989.4), ("H20", 148.0), ("B200", 2250.0), ("GB200", 2500.0), ("A100", 312.0), ("A800", 312.0),
    ("L40S", 362.0),
)
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
_chosen: torch.device | None = None


def choose(name: str = "auto", deterministic: bool = False) -> torch.device:
    """Decide the device of this process: "auto" takes CUDA where there is one. LOCAL_RANK names the GPU.

    deterministic: only kernels that give the same bits every time; torch raises where it has none. What the environment
    already says about cuBLAS, NCCL or transformer-engine stays.

    Raises:
        RuntimeError: "cuda" on a machine without a usable GPU, or a LOCAL_RANK without a GPU of its own.
    """
    global _chosen
    if name not in CHOICES:
        raise ValueError(f"run.device={name!r}: one of {', '.join(CHOICES)}")
    if deterministic:
        torch.use_deterministic_algorithms(True)
        for variable, value in DETERMINISTIC.items():  # read when the device is first used
            os.environ.setdefault(variable, value)
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"run.device is cuda, but torch {torch.__version__} sees no GPU; install a CUDA build of torch and check "
            "the driver, or set run.device=cpu"
        )
    if name == "cpu" or not torch.cuda.is_available():
        _chosen = torch.device("cpu")
        return _chosen
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise RuntimeError(f"LOCAL_RANK is {index}, but this host has {count} GPUs; start at most {count} ranks on it")
    _chosen = torch.device("cuda", index)
    torch.cuda.set_device(_chosen)
    return _chosen


def device() -> torch.device:
    """The device of this process (chosen as "auto" if nobody chose before)."""
    return _chosen if _chosen is not None else choose()


def is_cuda() -> bool:
    return device().type == "cuda"


def backend() -> str:
    """torch.distributed backend of the device."""
    return "nccl" if is_cuda() else "gloo"


def gpu_count() -> int:
    """GPUs that this process could use. Does not choose a device, and does not initialise CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def dtype(name: str) -> torch.dtype:
    """torch dtype of a config's name for it."""
    if name not in DTYPES:
        raise ValueError(f"run.dtype={name!r}: one of {', '.join(DTYPES)}")
    return DTYPES[name]


def product_name() -> str:
    """What the device calls itself, for example "NVIDIA H100 80GB HBM3"; "cpu" where there is no GPU."""
    return torch.cuda.get_device_name(device()) if is_cuda() else "cpu"


def peak_tflops(dtype_name: str) -> float | None:
    """Peak of one device in 10^12 operations a second, from the table above; None where it is not known.

    Known for bfloat16 only: what float32 products may reach depends on whether TF32 is allowed.
    """
    return known_peak(product_name()) if is_cuda() and dtype_name == "bfloat16" else None


def known_peak(product: str) -> float | None:
    """The table's peak for a GPU's name; a MIG slice, which is only a part of the GPU, has none."""
    if "MIG" in product.split():
        return None
    return next((tflops for words, tflops in PEAK_BF16_TFLOPS if re.search(rf"\b{words}\b", product)), None)


def synchronize() -> None:
    """Wait for the device to finish what was asked of it (nothing to wait for on CPU)."""
    if is_cuda():
        torch.cuda.synchronize()


def host_buffer(size: int) -> torch.Tensor:
    """`size` uninitialised bytes in host memory: pinned where there is a GPU, so that copies run at full speed."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=is_cuda())


def release_memory() -> None:
    """Give back what torch keeps of freed memory, so that another allocator on the device, such as a generation
    engine's own, can have it (nothing is kept on CPU)."""
    if is_cuda():
        torch.cuda.empty_cache()


def memory_peak_mb() -> float:
    """Peak memory in MiB since `reset_memory_peak`: allocated by torch on a GPU, resident set of the process on CPU."""
    if is_cuda():
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def reset_memory_peak() -> None:
    """Start a new peak. On CPU this needs Linux's /proc/self/clear_refs; if it cannot be written the old peak stays."""
    if is_cuda():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
