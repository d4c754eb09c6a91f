"""Plain data -> the dataclasses of the schema, with every wrong type, value and key collected on the way."""

from __future__ import annotations

import dataclasses
import operator
import re
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from rlhf_megatron.config import source
from rlhf_megatron.config.errors import Violation, nearest
from rlhf_megatron.config.schema import Config
from rlhf_megatron.config.source import Path


@cache
def hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def is_section(hint: Any) -> typing.TypeGuard[type]:
    """Whether a type of the schema is a section, not a value."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def fields(cls: type) -> dict[str, dataclasses.Field]:
    return {field.name: field for field in dataclasses.fields(cls)}


def leaves(cls: type, path: Path) -> Iterable[Path]:
    for name in fields(cls):
        hint = hints(cls)[name]
        if is_section(hint):
            yield from leaves(hint, (*path, name))
        else:
            yield (*path, name)


def unknown(cls: type, path: Path, name: str) -> str:
    """Message for an unknown key: the nearest one in its section, or the same name elsewhere, or all there are."""
    here = nearest(name, fields(cls))
    if here:
        return f"unknown key; did you mean {'.'.join((*path, here))}?"
    elsewhere = {leaf[-1]: ".".join(leaf) for leaf in reversed(list(leaves(Config, ())))}
    there = nearest(name, elsewhere)
    if there:
        return f"unknown key; did you mean {elsewhere[there]}?"
    return f"unknown key; {'.'.join(path) or 'a config'} has {', '.join(fields(cls))}"


class Builder:
    """Makes sections out of plain data and collects what is wrong with it."""

    def __init__(self, places: dict[Path, str], violations: list[Violation]) -> None:
        self.places, self.violations = dict(places), list(violations)
        self.refused: set[Path] = set()

    def refuse(self, path: Path, message: str) -> None:
        """Add a violation at the nearest place known; the value is not looked at again."""
        self.refused.add(path)
        where = next((self.places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.places), "")
        self.violations.append(Violation(".".join(path), message, where))

    def forget(self, path: Path) -> None:
        """Drop the places of a value that is being replaced."""
        for old in [place for place in self.places if place[: len(path)] == path]:
            del self.places[old]

    def section(self, cls: type, data: Any, path: Path) -> Any:
        """An instance of `cls`, or None when something in it was refused."""
        own = fields(cls)
        if path in self.refused:
            return None
        if not isinstance(data, dict):
            self.refuse(path, f"expected a section with keys {', '.join(own)}, got {_say(data)}")
            return None
        before = len(self.violations)
        values: dict[str, Any] = {}
        for name in data:
            if name not in own:
                self.refuse((*path, name), unknown(cls, path, name))
        for name, field in own.items():
            hint, inner = hints(cls)[name], (*path, name)
            if is_section(hint):
                values[name] = self.section(hint, data.get(name, {}), inner)
            elif self.is_refused(inner):
                continue
            elif name in data:
                try:
                    values[name] = _typed(data[name], hint)
                    _obey(values[name], field.metadata)
                except _Wrong as error:
                    self.refuse((*inner, *error.below), str(error))
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.refuse(inner, "has to be set")
        return None if len(self.violations) > before or self.is_refused(path) else cls(**values)

    def is_refused(self, path: Path) -> bool:
        """Whether the value at `path`, or something in it, was refused already."""
        return any(place[: len(path)] == path for place in self.refused)


class _Wrong(Exception):
    """A value of the wrong type or outside its range; `below` is the path inside the value."""

    def __init__(self, message: str, below: Path = ()) -> None:
        super().__init__(message)
        self.below = below


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def _say(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing (null)", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list | tuple) else repr(value)


def _typed(value: Any, hint: Any) -> Any:
    """The value as the hint wants it. A whole number is a number; nothing else is converted."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            if type(value) is (list if typing.get_origin(option) is tuple else option):
                return _typed(value, option)
        if float in arguments and type(value) is int:
            return float(value)
        raise _Wrong(f"expected {' or '.join(_WORDS.get(o, 'a list of texts') for o in arguments)}, got {_say(value)}")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _Wrong(f"expected a list of texts, got {_say(value)}")
        return tuple(_item(item, arguments[0], str(i)) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _Wrong(f"expected a mapping, got {_say(value)}")
        return {name: item if arguments[1] is Any else _item(item, arguments[1], name) for name, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is hint:
        return value
    remedy = ""
    if isinstance(value, str) and hint in (int, float) and (source.INT.match(value) or source.FLOAT.match(value)):
        remedy = "; write it without quotes"
    elif hint is int and isinstance(value, float) and value.is_integer():
        remedy = f"; write {int(value)}"
    elif hint is bool and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        remedy = "; write true or false"
    elif hint is str and isinstance(value, bool | int | float):
        remedy = "; put it in quotes"
    raise _Wrong(f"expected {_WORDS[hint]}, got {_say(value)}{remedy}")


def _item(value: Any, hint: Any, name: str) -> Any:
    try:
        return _typed(value, hint)
    except _Wrong as error:
        raise _Wrong(str(error), (name, *error.below)) from None


def _obey(value: Any, rules: typing.Mapping[str, Any]) -> None:
    """Raise _Wrong when a value, or an item of it, breaks the rules of its field. None (where the type allows it)
    breaks none."""
    if isinstance(value, dict | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            try:
                _obey(item, rules)
            except _Wrong as error:
                raise _Wrong(str(error), (str(name),)) from None
            if "choices" in rules and isinstance(value, tuple) and item in value[:name]:
                raise _Wrong(f"{item!r} is there twice; name it once", (str(name),))
        return
    if value is None:
        return
    choices = rules.get("choices")
    if choices and value not in choices:
        close = nearest(str(value), choices)
        hint = f"; did you mean {close}?" if close else ""
        raise _Wrong(f"{value!r} is none of {', '.join(choices)}{hint}")
    if "pattern" in rules and not re.fullmatch(rules["pattern"], value):
        raise _Wrong(f"{value!r} has to be {rules['pattern_says']}")
    for rule, (words, holds) in _RANGES.items():
        if rule in rules and not holds(value, rules[rule]):
            raise _Wrong(f"{value!r} has to be {words} {rules[rule]}")


_RANGES: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}
