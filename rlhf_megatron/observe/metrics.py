"""Metrics that merge exactly: numerators and denominators travel, quotients are taken once, at the end.

The mean of per-rank means depends on how tokens fell on ranks; pooled sums do not. So every stage reports a `Mean`
(numerator, denominator), a `Sum`, a `Max` or a `Min`, and `merge` folds any number of reports into one in any order.
A metric about nothing (denominator 0, maximum of no tokens) has the value None, never NaN. A NaN in the data stays NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Union


def _number(value: Any) -> float:
    """A float of a Python number or of a one-element tensor (detached: a metric never holds a graph)."""
    return float(value.detach() if hasattr(value, "detach") else value)


@dataclass(frozen=True)
class Mean:
    """A quotient of two sums, for example clipped tokens over valid tokens."""

    numerator: Any  # a float once it is made; a one-element tensor is taken, too
    denominator: Any = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "numerator", _number(self.numerator))
        object.__setattr__(self, "denominator", _number(self.denominator))

    @property
    def value(self) -> float | None:
        return None if self.denominator == 0 else self.numerator / self.denominator

    def merge(self, other: Mean) -> Mean:
        return Mean(self.numerator + other.numerator, self.denominator + other.denominator)

    def to_list(self) -> list[Any]:
        return ["mean", self.numerator, self.denominator]


@dataclass(frozen=True)
class Sum:
    """A total, for example seconds or bytes."""

    value: Any = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _number(self.value))

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)

    def to_list(self) -> list[Any]:
        return ["sum", self.value]


@dataclass(frozen=True)
class Max:
    """The largest of single items (tokens, rows, ranks), not of means; None when there was no item."""

    value: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", None if self.value is None else _number(self.value))

    def merge(self, other: Max) -> Max:
        return Max(_extreme(max, self.value, other.value))

    def to_list(self) -> list[Any]:
        return ["max", self.value]


@dataclass(frozen=True)
class Min:
    """The smallest of single items, not of means; None when there was no item."""

    value: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", None if self.value is None else _number(self.value))

    def merge(self, other: Min) -> Min:
        return Min(_extreme(min, self.value, other.value))

    def to_list(self) -> list[Any]:
        return ["min", self.value]


Metric = Union[Mean, Sum, Max, Min]

_KINDS: dict[str, type] = {"mean": Mean, "sum": Sum, "max": Max, "min": Min}


def _extreme(choose: Any, a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    if math.isnan(a) or math.isnan(b):  # max(nan, 1.0) depends on the order of its arguments: a NaN must stay visible
        return math.nan
    return choose(a, b)


def merge(reports: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Fold reports of ranks, micro-batches or mini-batches into one.

    Raises TypeError when one name is reported as two kinds, because no merge of them would mean anything.
    """
    merged: dict[str, Metric] = {}
    for report in reports:
        for name, metric in report.items():
            if name not in merged:
                merged[name] = metric
            elif type(merged[name]) is not type(metric):
                raise TypeError(
                    f"metric {name!r} is reported as {type(merged[name]).__name__} and as {type(metric).__name__}: "
                    "one name has one kind; rename one of the two"
                )
            else:
                merged[name] = merged[name].merge(metric)  # type: ignore[arg-type]
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Name -> value, without the metrics that are about nothing."""
    return {name: metric.value for name, metric in metrics.items() if metric.value is not None}


def to_lists(metrics: Mapping[str, Metric]) -> dict[str, list[Any]]:
    """The form sent between processes: plain lists such as ["mean", 6.0, 15.0]."""
    return {name: metric.to_list() for name, metric in metrics.items()}


def from_list(item: list[Any] | tuple[Any, ...]) -> Metric:
    """The inverse of `Metric.to_list`. Raises ValueError on anything else."""
    kind = _KINDS.get(item[0]) if item else None
    if kind is None or len(item) != (3 if kind is Mean else 2):
        raise ValueError(f"{item!r} is not a metric: expected [kind, ...] with kind one of {', '.join(_KINDS)}")
    return kind(*item[1:])


def from_lists(items: Mapping[str, list[Any]]) -> dict[str, Metric]:
    """The inverse of `to_lists`."""
    return {name: from_list(item) for name, item in items.items()}
