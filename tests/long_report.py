"""Write the report of `make test-long`: which long tests ran, on which commit, how long they took.

    python tests/long_report.py build/long.xml docs/long_tests.md
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree


def outcome(case: ElementTree.Element) -> str:
    for kind, word in (("failure", "FAILED"), ("error", "ERROR"), ("skipped", "skipped")):
        if (found := case.find(kind)) is not None:
            reason = (found.get("message") or "").splitlines()
            return f"{word}: {reason[0][:100]}" if reason else word
    return "passed"


def measured(case: ElementTree.Element) -> str:
    """What the test recorded with record_property, as "name: value"."""
    return "; ".join(f"{item.get('name')}: {item.get('value')}" for item in case.iter("property"))


def commit() -> str:
    """The commit of the tree, with a remark when the tree differs from it."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = "" if not git("status", "--porcelain", "--untracked-files=no") else " with uncommitted changes"
    return (git("rev-parse", "HEAD") or "no commit yet") + changed


def report(xml: Path) -> str:
    """The text of the report, from pytest's junit file."""
    cases = list(ElementTree.parse(xml).getroot().iter("testcase"))
    results = [(f"{case.get('classname', '')}::{case.get('name')}", outcome(case), float(case.get("time", 0)),
                measured(case)) for case in cases]
    passed = sum(result == "passed" for _, result, _, _ in results)
    lines = [
        "# Long tests",
        "",
        "Written by `make test-long`; do not edit.",
        "",
        f"- commit: {commit()}",
        f"- date: {datetime.date.today().isoformat()}",
        f"- machine: {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        f"- result: {passed} of {len(results)} passed, {sum(seconds for _, _, seconds, _ in results):.0f} s",
        "",
        "| test | result | seconds | measured |",
        "|---|---|---|---|",
    ]
    for name, result, seconds, figures in results:
        lines.append(f"| {name} | {result.replace('|', '/')} | {seconds:.1f} | {figures.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    if not source.is_file():
        sys.exit(f"{source}: pytest left no results here; it did not come as far as running tests")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report(source), encoding="utf-8")
    print(f"report: {target}")
