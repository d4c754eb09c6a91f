"""Write the 64 short sums "What is x + y?" (x, y in 2..9) with their answers as JSONL.

    python examples/make_sums_data.py --out build/sums
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def sums() -> list[dict[str, object]]:
    """All rows, with the answer as text in the column `answer`."""
    return [{"prompt": f"What is {x} + {y}?", "answer": str(x + y)} for x in range(2, 10) for y in range(2, 10)]


def write(out: Path) -> Path:
    """Write the rows into the folder `out`; returns the file."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums()), encoding="utf-8")
    return out / "train.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/sums"))
    print(f"{len(sums())} sums: {write(parser.parse_args().out)}")


if __name__ == "__main__":
    main()
