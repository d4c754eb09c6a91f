"""Reward functions by name: built-in ones register themselves, a user's are named as "module:function"."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable
from typing import Any

RewardFunction = Callable[..., Any]

_FUNCTIONS: dict[str, RewardFunction] = {}
_MODULE_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)


class RewardError(RuntimeError):
    """A reward function cannot be found, fails, or gives an unusable result; the message names function and row."""

    @property
    def explains_itself(self) -> bool:
        """Unless the function raised: then its traceback is wanted, too."""
        return self.__cause__ is None


def register(name: str) -> Callable[[RewardFunction], RewardFunction]:
    """Decorator: make a function known as `reward.function: name`. RewardError when the name is taken."""

    def add(function: RewardFunction) -> RewardFunction:
        if _FUNCTIONS.get(name, function) is not function:
            raise RewardError(f"reward {name!r} is registered already, by {_FUNCTIONS[name].__module__}")
        _FUNCTIONS[name] = function
        return function

    return add


def names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_FUNCTIONS)


def get_reward(name: str) -> RewardFunction:
    """The function behind a registered name or "package.module:function" (in the working directory or on PYTHONPATH).

    Raises:
        RewardError: no such name, module or function; file paths are not accepted.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if not _MODULE_FUNCTION.match(name):
        near = difflib.get_close_matches(name, _FUNCTIONS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RewardError(f"reward.function {name!r}: {hint}known names are {names()}; an own function is named as "
                          "'package.module:function'")
    module_name, function_name = name.split(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a user's module can raise anything
        raise RewardError(f"reward.function {name!r}: importing {module_name} fails: {type(error).__name__}: {error} "
                          "(is its directory on PYTHONPATH?)") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"reward.function {name!r}: module {module_name} has no function {function_name!r}")
    return function
