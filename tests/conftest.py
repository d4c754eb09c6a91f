"""Every test: one thread per process (many ranks share few cores), and tests/ importable (`from ranks import
run_ranks`)."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402

torch.set_num_threads(1)
