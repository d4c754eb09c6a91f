"""Checkpoints of a run: written aside, renamed when complete, found again by `latest`.

`<run folder>/checkpoints/step_000010/` holds one directory per trained role and `trainer.json`. A directory under that
name is complete; one that is being written is called `.writing-step_000010`, and is removed by the next save.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from rlhf_megatron.controller.worker_group import WorkerGroup

_STEP = re.compile(r"step_(\d+)\Z")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found or used; the message names the path and the remedy."""

    explains_itself = True


def step_of(path: Path) -> int | None:
    """The step in a checkpoint directory's name, or None for a foreign directory."""
    match = _STEP.match(path.name)
    return int(match.group(1)) if match else None


class Checkpoints:
    """Saves and finds the checkpoints of one run folder.

    Args:
        folder: the run folder.
        keep: how many complete checkpoints stay (0 = all).
        meaning: plain data that must be the same on resume (model, data, algorithm, batch).
    """

    def __init__(self, folder: Path, keep: int, meaning: dict[str, Any]) -> None:
        self.folder = Path(folder) / "checkpoints"
        self.keep = keep
        # Through JSON once, so that what was saved compares equal to what is asked (tuples become lists).
        self.meaning = json.loads(json.dumps(meaning))

    def complete(self) -> list[Path]:
        """Complete checkpoints of this run, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [p for p in self.folder.iterdir() if step_of(p) is not None and (p / "trainer.json").is_file()]
        return sorted(found, key=lambda p: step_of(p) or 0)

    def set_aside(self) -> Path | None:
        """Move the checkpoints of an earlier run in this folder to `checkpoints.<n>`: a fresh run must neither lose
        them nor resume from them. Returns where they are now; None when there were none."""
        if not self.complete():
            return None
        number = next(n for n in itertools.count(1) if not self.folder.with_name(f"checkpoints.{n}").exists())
        return self.folder.rename(self.folder.with_name(f"checkpoints.{number}"))

    def save(self, step: int, groups: dict[str, WorkerGroup], state: dict[str, Any]) -> Path:
        """Write a checkpoint of every group and the trainer's state; publish it; drop what `keep` no longer covers."""
        name = f"step_{step:06d}"
        aside, final = self.folder / f".writing-{name}", self.folder / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left_over in self.folder.glob(".writing-step_*"):
                shutil.rmtree(left_over)
            aside.mkdir()
            for role, group in groups.items():
                group.save(directory=str(aside / role))
            document = {"step": step, "roles": sorted(groups), "meaning": self.meaning, "state": state}
            _write_synced(aside / "trainer.json", json.dumps(document, indent=1))
            if final.exists():
                shutil.rmtree(final)
            os.rename(aside, final)
            _write_synced(self.folder / "latest.new", name)
            os.replace(self.folder / "latest.new", self.folder / "latest")
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            free = shutil.disk_usage(self.folder if self.folder.is_dir() else self.folder.parent).free
            raise CheckpointError(
                f"checkpoint {final} was not written ({error}); {free / 2**20:.0f} MiB are free there; earlier "
                "checkpoints are untouched"
            ) from error
        if self.keep:
            for old in self.complete()[: -self.keep]:
                shutil.rmtree(old)
        return final

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `trainer.resume` names: None for "never", or for "auto" when there is none yet.

        Raises:
            CheckpointError: a named checkpoint is not there, or is not complete.
        """
        if resume == "never":
            return None
        if resume == "auto":
            complete = self.complete()
            return complete[-1] if complete else None
        path = Path(resume)
        if not (path / "trainer.json").is_file() or path.name.startswith(".writing-"):
            raise CheckpointError(f"trainer.resume: {path} is not a complete checkpoint (no trainer.json); name a "
                                  "step_NNNNNN directory, or use auto")
        return path

    def load(self, path: Path, groups: dict[str, WorkerGroup]) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint into the groups. Returns its step and the trainer's state.

        Raises:
            CheckpointError: the run means something else than the one that was saved; all differences are listed.
        """
        document = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        saved = document["meaning"]
        differences = [
            f"  {key}: saved {saved.get(key)!r}, now {self.meaning.get(key)!r}"
            for key in sorted(set(saved) | set(self.meaning))
            if saved.get(key) != self.meaning.get(key)
        ]
        missing = sorted(set(groups) - set(document["roles"]))
        differences += [f"  role {role}: not in the checkpoint" for role in missing]
        if differences:
            raise CheckpointError(f"{path} was saved by a run that means something else:\n" + "\n".join(differences)
                                  + "\nset these keys back, or start with trainer.resume=never under another run.name")
        for role, group in groups.items():
            group.load(directory=str(path / role))
        return document["step"], document["state"]


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
