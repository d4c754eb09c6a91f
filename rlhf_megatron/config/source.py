"""YAML text -> plain data with the line of every value. Nothing is ever constructed but text, numbers, lists, mappings.

PyYAML parses and composes; the values are made here from the composed nodes, because that is where lines are still
known and where duplicate keys can still be seen. Plain scalars follow YAML 1.2 (`1e-6` is a number, `yes` is text), not
PyYAML's 1.1 (`1e-6` is text, `yes` is true, `010` is 8).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlhf_megatron.config.errors import ConfigError, Violation

MAX_TEXT = 1 << 20  # characters of one file
MAX_DEPTH = 32  # levels, aliases followed
MAX_VALUES = 10_000  # values, aliases followed: ten levels of ten aliases would be 10^10
MAX_DIGITS = 18  # of a whole number: more is a slip, and Python refuses to print very long ones

INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")
FLOAT = re.compile(r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)\Z")
CONSTANTS = {"": None, "~": None, "null": None, "Null": None, "NULL": None,
             "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}

Path = tuple[str, ...]


@dataclass
class Source:
    """Plain data of one text, the place of every value, and what was wrong but could be read past."""

    data: Any = None
    places: dict[Path, str] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """SafeLoader that resolves nothing and refuses tags and depth while it still knows the line."""

    yaml_implicit_resolvers: dict = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        # the scanner runs far ahead of the composer, and its time grows with the square of open brackets
        if self.flow_level > MAX_DEPTH:
            raise _Refused(self.get_mark(), f"values are nested deeper than {MAX_DEPTH} levels; flatten them")
        super().fetch_flow_collection_start(token_class)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:
            shown = tag.replace("tag:yaml.org,2002:", "!!", 1)
            raise _Refused(event.start_mark, f"the tag {shown} is refused; write the value itself")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Refused(event.start_mark, f"values are nested deeper than {MAX_DEPTH} levels; flatten them")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Refused(Exception):
    """Ends the reading at once; `mark` has the line."""

    def __init__(self, mark: Any, message: str) -> None:
        super().__init__(message)
        self.mark, self.message = mark, message


def read_yaml(text: str, name: str, *, numbered: bool = True, prefix: Path = ()) -> Source:
    """Plain data of a YAML text.

    Args:
        text: the YAML.
        name: what errors call the text: a file's path, or "override 'a=1'".
        numbered: say the line ("name:12"); off for the one-line text of an override.
        prefix: path under which the places are kept.

    Raises:
        ConfigError: the text is no YAML, or has a tag, a bomb, or something else that cannot be read past.
    """
    reader = _Reader(name, numbered)
    try:
        if len(text) > MAX_TEXT:
            raise _Refused(None, f"{len(text)} characters are more than a config's {MAX_TEXT}")
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is not None:
            reader.source.data = reader.value(node, prefix)
        reader.look_for_lost_text(node, text)
    except _Refused as error:
        raise ConfigError([Violation("", error.message, reader.place(error.mark))]) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or str(error).replace("\n", " ")
        raise ConfigError([Violation("", f"this is not valid YAML: {problem}", reader.place(mark))]) from None
    except RecursionError:
        raise ConfigError([Violation("", f"values are nested deeper than {MAX_DEPTH} levels", name)]) from None
    return reader.source


class _Reader:
    """Walks composed nodes. Aliases are followed, so the walk counts what it makes."""

    def __init__(self, name: str, numbered: bool) -> None:
        self.name, self.numbered, self.count, self.source = name, numbered, 0, Source()

    def place(self, mark: Any) -> str:
        return f"{self.name}:{mark.line + 1}" if self.numbered and mark is not None else self.name

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise _Refused(node.start_mark, f"more than {MAX_VALUES} values once its aliases are followed; use fewer")
        if len(path) > MAX_DEPTH:
            raise _Refused(node.start_mark, f"values are nested deeper than {MAX_DEPTH} levels, aliases followed")
        self.source.places.setdefault(path, self.place(node.start_mark))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(i))) for i, item in enumerate(node.value)]
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        made: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            name = self.key(key_node)
            where, dotted = self.place(key_node.start_mark), ".".join((*path, name))
            if name == "_target_":
                self.source.violations.append(Violation(dotted, "names something to call, which a config may not do; "
                                                        "remove it", where))
            elif name in made:
                also = f" (first in line {first[name]})" if self.numbered else ""
                self.source.violations.append(Violation(dotted, f"is written twice{also}; keep one", where))
            else:
                first[name] = key_node.start_mark.line + 1
                made[name] = self.value(value_node, (*path, name))
                self.source.places[(*path, name)] = where
        return made

    def key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise _Refused(node.start_mark, "a key has to be text, not a list or a mapping")
        if node.value == "<<" and node.style is None:
            raise _Refused(node.start_mark, "merge keys (<<) are not read; repeat the keys, or use ${section.key}")
        value = self.scalar(node)
        if not isinstance(value, str):
            raise _Refused(node.start_mark, f"a key has to be text: quote {node.value!r}")
        return value

    def scalar(self, node: yaml.ScalarNode) -> Any:
        text = node.value
        if node.style is not None:  # quoted or a block: text, whatever it looks like
            return text
        if text in CONSTANTS:
            return CONSTANTS[text]
        if INT.match(text):
            if len(text.lstrip("+-")) > MAX_DIGITS:
                raise _Refused(node.start_mark, f"a whole number of {len(text)} digits; {MAX_DIGITS} are the most")
            return int(text)
        if FLOAT.match(text):
            number = float(text)
            if not math.isfinite(number):
                raise _Refused(node.start_mark, f"the number {text[:40]} is too large")
            return number
        return text

    def look_for_lost_text(self, node: yaml.Node | None, text: str) -> None:
        """In an override, what YAML takes for a comment was hardly meant as one."""
        if not self.numbered and text[node.end_mark.index if node is not None else 0:].strip():
            raise _Refused(None, "'#' begins a comment in YAML, so the rest would be lost; put the value in quotes")
