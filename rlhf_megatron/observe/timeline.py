"""When each pool worked on which call: `timeline.json` of a run, for chrome://tracing or ui.perfetto.dev.

The file is a JSON array whose closing bracket is never written, which the trace format allows, so that it is whole
after every event however the run ends.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

FILE = "timeline.json"


class Timeline:
    """Writes one event per call: the pool is the process of the trace, the role its thread."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder) / FILE
        if path.exists():  # of an earlier run, or of the part before a resume, on another clock
            number = next(n for n in itertools.count(1) if not path.with_suffix(f".{n}.json").exists())
            path.rename(path.with_suffix(f".{number}.json"))
        self._file = path.open("w", encoding="utf-8")
        self._file.write("[")
        self._rows: dict[tuple[str, ...], int] = {}

    def add(self, pool: str, role: str, method: str, began: float, ended: float) -> None:
        """A call of `role`.`method`; times in seconds of one clock. It fits `WorkerGroup.watch`."""
        process, thread = self._row("process_name", pool), self._row("thread_name", pool, role)
        self._write({"name": f"{role}.{method}", "ph": "X", "pid": process, "tid": thread, "ts": round(began * 1e6),
                     "dur": round((ended - began) * 1e6)})
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _row(self, kind: str, pool: str, *role: str) -> int:
        """The number of a pool or of a role on it; its name is written when it is first asked for."""
        if (pool, *role) not in self._rows:
            self._rows[pool, *role] = number = len(self._rows)
            row = {"pid": self._rows[pool,], **({"tid": number} if role else {})}
            self._write({"name": kind, "ph": "M", **row, "args": {"name": role[0] if role else pool}})
        return self._rows[pool, *role]

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write("\n" + json.dumps(event) + ",")


def read(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a run's timeline, each call with `pool` and `role` by name."""
    text = (Path(folder) / FILE).read_text(encoding="utf-8")
    events = json.loads(text.rstrip().rstrip(",") + "]")
    names = {(event["pid"], event.get("tid")): event["args"]["name"] for event in events if event["ph"] == "M"}
    return [event | {"pool": names[event["pid"], None], "role": names[event["pid"], event["tid"]]}
            for event in events if event["ph"] == "X"]
