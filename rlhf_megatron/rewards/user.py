"""Calling a reward function and checking what it gives back: whatever is wrong is named with function and row."""

from __future__ import annotations

import copy
import inspect
import math
import time
from collections.abc import Callable
from typing import Any

from rlhf_megatron.rewards.registry import RewardError, get_reward

_RESERVED = {"mean", "std", "min", "max"}  # reward/<these> are the metrics of the reward itself
_SEARCH_SECONDS = 30.0
EXTRAS = ("lengths", "finish_reasons")  # per-row lists for functions that name such a parameter


def find_reward(name: str, arguments: dict[str, Any]) -> Callable:
    """The reward function, known to take `arguments`: what can be said before anything is generated.

    Raises:
        RewardError: no such module or function, importing it fails, or it does not take what it would be called with.
    """
    function = get_reward(name)
    _wanted_extras(name, function, arguments, {key: [] for key in EXTRAS})
    return function


def call_reward(
    name: str,
    arguments: dict[str, Any],
    prompts: list[str],
    responses: list[str],
    rows: list[dict[str, Any]],
    extras: dict[str, list],
) -> tuple[list[float], list[dict[str, float]]]:
    """One reward and one dict of components for each row.

    `extras` are per-row lists that the function gets if it names a parameter like them. When the function raises, it is
    called again one row at a time (for half a minute at most) only to name the row that fails.

    Raises:
        RewardError: see above; also for None, NaN, infinities, text, or a list of another length than the rows.
    """
    function = get_reward(name)
    wanted = _wanted_extras(name, function, arguments, extras)

    def call(picked: slice) -> Any:
        given = {key: values[picked] for key, values in wanted.items()}
        return function(prompts[picked], responses[picked], copy.deepcopy(rows[picked]), **arguments, **given)

    try:
        result = call(slice(None))
    except Exception as error:  # a user's function can raise anything
        raise RewardError(f"reward function {name!r} fails on {_failing_row(call, len(prompts))}: "
                          f"{type(error).__name__}: {error}") from error
    if hasattr(result, "tolist"):  # numpy and torch vectors
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise RewardError(f"reward function {name!r} gives {type(result).__name__}, not a list with one item a row")
    if len(result) != len(prompts):
        raise RewardError(f"reward function {name!r} gives {len(result)} rewards for {len(prompts)} rows")
    checked = [_checked(name, row, item) for row, item in enumerate(result)]
    return [reward for reward, _ in checked], [components for _, components in checked]


def _wanted_extras(
    name: str, function: Callable, arguments: dict[str, Any], extras: dict[str, list]
) -> dict[str, list]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables of compiled modules have none
        return {}
    if taken := sorted(arguments.keys() & (extras.keys() | {"prompts", "responses", "rows"})):
        raise RewardError(f"reward.arguments {taken} are given by the system, not by the config")
    wanted = {key: values for key, values in extras.items() if key in signature.parameters}
    try:
        signature.bind([], [], [], **arguments, **wanted)
    except TypeError as error:
        raise RewardError(f"reward function {name!r} with parameters {signature} does not take (prompts, responses, "
                          f"rows) and reward.arguments {sorted(arguments)}: {error}") from error
    return wanted


def _failing_row(call: Callable[[slice], Any], rows: int) -> str:
    deadline = time.monotonic() + _SEARCH_SECONDS
    for row in range(rows):
        if time.monotonic() > deadline:
            return f"a batch of {rows} rows (rows 0 to {row - 1} alone do not fail)"
        try:
            call(slice(row, row + 1))
        except Exception:  # the first error is the one that is reported
            return f"row {row}"
    return f"the batch of {rows} rows (no row alone fails)"


def _checked(name: str, row: int, item: Any) -> tuple[float, dict[str, float]]:
    if isinstance(item, dict):
        if "reward" not in item:
            raise RewardError(f"reward function {name!r}, row {row}: the dict has no 'reward', only "
                              f"{sorted(map(str, item))}")
        if clash := sorted(_RESERVED & item.keys()):
            raise RewardError(f"reward function {name!r}, row {row}: components {clash} are names of reward metrics")
        reward = _number(name, row, "reward", item["reward"])
        return reward, {str(key): _number(name, row, str(key), value) for key, value in item.items() if key != "reward"}
    return _number(name, row, "reward", item), {}


def _number(name: str, row: int, what: str, value: Any) -> float:
    if hasattr(value, "item"):  # numpy and torch scalars
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            value = None
    if not isinstance(value, (bool, int, float)):
        raise RewardError(f"reward function {name!r}, row {row}: {what} is {value!r:.60}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"reward function {name!r}, row {row}: {what} is {number}, which must be finite")
    return number
