"""What is wrong with a config, as data (`Violation`) and as one exception that says all of it (`ConfigError`)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Args:
        key: the dotted key, for example "actor.parallel.tp"; "" for the file as a whole.
        message: the numbers, the rule, and what to change.
        where: "file.yaml:12" or "override 'a.b=1'" where the value came from a place that can be named.
    """

    key: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


class ConfigError(ValueError):
    """A config that is refused. `violations` holds every rule that it breaks, the message one line for each."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([head, *(f"  {violation}" for violation in self.violations)]))

    @classmethod
    def of(cls, violations: Iterable[Violation]) -> ConfigError:
        return cls(violations)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is alike."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
