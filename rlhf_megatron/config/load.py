"""A YAML file and `key=value` overrides -> `Config`, strictly: everything that is not understood is refused, at once.

    config = load_config("run.yaml", ["actor.optimizer.lr=1e-5"])
    open("copy.yaml", "w").write(to_yaml(config))     # loads back to an equal Config
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml

from rlhf_megatron.config import source
from rlhf_megatron.config.build import Builder, fields, hints, is_section, leaves, unknown
from rlhf_megatron.config.errors import ConfigError, Violation
from rlhf_megatron.config.interpolate import escape, interpolate
from rlhf_megatron.config.schema import Config

__all__ = ["ConfigError", "Violation", "known_keys", "load_config", "parse_config", "to_yaml"]


def load_config(path: str | FilePath, overrides: Sequence[str] = ()) -> Config:
    """Read a config file.

    Args:
        path: the YAML file.
        overrides: "dotted.key=value", the value read as YAML; a later one wins.

    Raises:
        ConfigError: with every violation found: place, key, and what to change.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(source.MAX_TEXT + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else (error.strerror or str(error))
        raise ConfigError([Violation("", f"cannot be read: {reason}", str(path))]) from None
    return parse_config(text, str(path), overrides)


def parse_config(text: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """`load_config` for a text that is already there; `name` is what errors call it."""
    read = source.read_yaml(text, name)
    if not isinstance(read.data, dict):
        raise ConfigError([Violation("", "a config is a mapping of sections: " + ", ".join(fields(Config)), name)])
    tree = _defaults(Config)
    _lay_over(Config, tree, read.data)
    builder = Builder(read.places, read.violations)
    for override in overrides:
        _apply(override, tree, builder)
    tree, bad = interpolate(tree)
    for path, violation in bad:
        builder.refuse(path, violation.message)
    config = builder.section(Config, tree, ())
    if builder.violations:
        raise ConfigError(builder.violations)
    return config


def to_yaml(config: Config) -> str:
    """The whole config, defaults included, as YAML that `load_config` reads back to an equal Config."""
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def known_keys() -> list[str]:
    """Every dotted key of the schema, in its order."""
    return [".".join(path) for path in leaves(Config, ())]


def _defaults(cls: type) -> dict[str, Any]:
    """A section's defaults as plain data; what has to be given is absent."""
    tree: dict[str, Any] = {}
    for name, field in fields(cls).items():
        if is_section(hints(cls)[name]):
            tree[name] = _defaults(hints(cls)[name])
        elif field.default is not dataclasses.MISSING:
            tree[name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            tree[name] = _plain(field.default_factory())
    return tree


def _lay_over(cls: type, tree: dict[str, Any], given: dict[str, Any]) -> None:
    """Put what is given over a section of the tree, key by key; unknown keys too, for the builder to name."""
    for name, value in given.items():
        hint = hints(cls).get(name)
        if is_section(hint) and isinstance(value, dict) and isinstance(tree.get(name), dict):
            _lay_over(hint, tree[name], value)
        elif not (is_section(hint) and value is None):  # "critic:" with nothing below says nothing
            tree[name] = value


def _apply(override: str, tree: dict[str, Any], builder: Builder) -> None:
    """Put one "a.b=value" into the tree."""
    shown = override if len(override) <= 80 else override[:77] + "..."
    where = f"override {shown!r}"
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        problem: str | None = "an override reads key=value, for example actor.optimizer.lr=1e-5"
        dotted = ""
    else:
        problem = _path_problem(path)
    if problem:
        builder.violations.append(Violation(dotted, problem, where))
        return
    try:
        read = source.read_yaml(text, where, numbered=False, prefix=path)
    except ConfigError as error:
        builder.violations.extend(dataclasses.replace(violation, key=dotted) for violation in error.violations)
        return
    builder.violations.extend(read.violations)
    inner: Any = tree
    cls: Any = Config
    for name in path[:-1]:
        inner, cls = inner.setdefault(name, {}), hints(cls).get(name) if is_section(cls) else None
        if not isinstance(inner, dict):
            problem = f"{name} is set to {inner!r} and has no keys; override it whole"
            builder.violations.append(Violation(dotted, problem, where))
            return
    builder.forget(path)
    builder.places.update(read.places)
    builder.places[path] = where
    if is_section(cls):
        _lay_over(cls, inner, {path[-1]: read.data})
    else:
        inner[path[-1]] = read.data


def _path_problem(path: source.Path) -> str | None:
    """Why an override's key is none of the schema's."""
    cls: Any = Config
    for depth, name in enumerate(path):
        if name == "_target_":
            return "names something to call, which a config may not do; remove it"
        if is_section(cls):
            if name not in fields(cls):
                return unknown(cls, path[:depth], name)
            cls = hints(cls)[name]
        elif typing.get_origin(cls) is not dict:  # below a dict the keys are free
            return f"{'.'.join(path[:depth])} is a value and has no keys"
    return None


# ---- dataclasses -> YAML ----


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in fields(type(value))}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return escape(value) if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes what this package's reader would take for a number, besides what PyYAML's own would; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _pattern in (source.INT, source.FLOAT):
    _Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _pattern, list("+-.0123456789"))


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # only double quotes keep every line break and control character as it is
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)
