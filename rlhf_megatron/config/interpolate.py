"""`${section.key}` inside a config: checked here, carried out by OmegaConf.

Only references to other keys are allowed. Resolvers (`${oc.env:HOME}` and the like) are refused: what a run means must
stand in its config, and a value from the environment would be written, secret or not, into the run's folder. Every
reference is measured before anything is expanded, so neither cycles nor doubling strings reach OmegaConf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.config.errors import Violation, nearest
from rlhf_megatron.config.source import MAX_TEXT, Path

MAX_CHAIN = 8  # references that lead to references
_OPENING = re.compile(r"(\\*)\$\{")
_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\}")


class _Bad(Exception):
    """A reference that cannot be followed."""


def escape(text: str) -> str:
    """Text that stands for itself when it is read back: "${" becomes "\\${"."""
    return _OPENING.sub(lambda found: found[1] * 2 + "\\${", text)


def interpolate(tree: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Path, Violation]]]:
    """The tree with its references replaced, or the violations (each with its path) that keep it from being so."""
    found: list[tuple[Path, Violation]] = []
    sizes: dict[Path, int] = {}
    texts = [(path, text) for path, text in _texts(tree, ()) if "${" in text]
    total = 0
    for path, text in texts:
        try:
            total += _size(tree, path, text, sizes, (), 0)
            if total > MAX_TEXT:
                raise _Bad(f"references expand to more than {MAX_TEXT} characters; use fewer")
        except _Bad as error:
            found.append((path, Violation(".".join(path), str(error))))
    if found or not texts:
        return tree, found
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        key = getattr(error, "full_key", None) or ""
        path = tuple(key.split(".")) if key else ()
        return tree, [(path, Violation(key, f"cannot be interpolated: {str(error).splitlines()[0]}"))]
    return resolved, []  # type: ignore[return-value]


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, (*path, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _texts(item, (*path, str(i)))


def _references(text: str) -> Iterator[Path]:
    for opening in _OPENING.finditer(text):
        if len(opening[1]) % 2:  # an odd number of backslashes: escaped
            continue
        reference = _REFERENCE.match(text, opening.end(1))
        if reference is None:
            rest = text[opening.end(1):opening.end(1) + 40]
            raise _Bad(f"{rest!r} is no reference like ${{section.key}}; resolvers and environment variables are not "
                       "read in a config: write the value, or give it as an override key=value")
        yield tuple(reference[1].split("."))


def _size(tree: Any, path: Path, value: Any, sizes: dict[Path, int], open_: tuple[Path, ...], chain: int) -> int:
    """Characters and values that `value` expands to."""
    if path in sizes:
        return sizes[path]
    if path in open_:
        raise _Bad("refers to itself: " + " -> ".join(".".join(p) for p in (*open_[open_.index(path):], path)))
    if chain > MAX_CHAIN:
        raise _Bad(f"references lead to references more than {MAX_CHAIN} times; refer to the value itself")
    inner, size = (*open_, path), 1
    if isinstance(value, str):
        size += len(value)
        for target in _references(value):
            size += _size(tree, target, _lookup(tree, target), sizes, inner, chain + 1)
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else ((str(i), item) for i, item in enumerate(value))
        for name, item in items:
            size += _size(tree, (*path, name), item, sizes, inner, chain)
    if size > MAX_TEXT:
        raise _Bad(f"references expand to more than {MAX_TEXT} characters; use fewer")
    sizes[path] = size
    return size


def _lookup(tree: Any, path: Path) -> Any:
    value = tree
    for depth, name in enumerate(path):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            known = nearest(name, value) if isinstance(value, dict) else None
            hint = f"; did you mean {'.'.join((*path[:depth], known))}?" if known else "; set it or write the value"
            raise _Bad(f"refers to {'.'.join(path)}, which is not set{hint}")
    return value
