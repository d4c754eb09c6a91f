"""Which rows share a micro-batch: by a number of rows, or by a budget of tokens. Plain numbers, no tensors.

Everything depends on the arguments alone, so ranks that hold the same rows come to the same micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def by_rows(lengths: Sequence[int], rows: int, count: int = 1) -> list[list[int]]:
    """Micro-batches of at most `rows` rows of about equal length, the longest first; at least `count` of them.

    Those beyond what the rows fill are empty.
    """
    if rows < 1:
        raise ValueError(f"micro_batch_size={rows}: a micro-batch has at least one row")
    order = _longest_first(lengths)
    groups = [sorted(order[first : first + rows]) for first in range(0, len(order), rows)]
    return groups + [[] for _ in range(len(groups), count)]


def by_tokens(
    lengths: Sequence[int], limit: int, packed: bool, count: int = 1, linear: float = 1.0, quadratic: float = 0.0
) -> list[list[int]]:
    """Micro-batches that never hold more than `limit` tokens, as few as fit, but at least `count`; the largest first.

    Args:
        lengths: tokens of every row, with whatever padding of its own it needs.
        limit: tokens of one micro-batch: the sum of its rows' lengths when `packed`, else rows x longest row.
        count: rows are spread over more micro-batches than they need until there are so many. Where rows run out,
            micro-batches are empty.
        linear, quadratic: the cost of a row of length L is linear * L + quadratic * L^2; packed micro-batches are
            balanced by it.

    Raises:
        ValueError: a row alone is above the limit, with the row, its length and the limit.
    """
    for row, length in enumerate(lengths):
        if length > limit:
            raise ValueError(f"row {row} has {length} tokens, more than micro_batch_tokens({limit}) of a micro-batch; "
                             "raise it, or shorten prompts or responses")
    groups = _first_fit(lengths, limit) if packed else _of_equal_length(lengths, limit)
    wanted = max(len(groups), min(count, len(lengths)))
    if packed:
        costs = [linear * length + quadratic * length * length for length in lengths]
        groups = _balanced(lengths, limit, wanted, costs) or groups
    while len(groups) < wanted:
        _halve_the_largest(groups, lengths, packed)
    groups = [sorted(group) for group in groups]
    groups.sort(key=lambda group: (-sum(lengths[row] for row in group), group))
    return groups + [[] for _ in range(len(groups), count)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _first_fit(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """First-fit decreasing, which needs at most 11/9 of the fewest bins, plus one (Johnson 1973)."""
    groups: list[list[int]] = []
    room: list[int] = []
    for row in _longest_first(lengths):
        for index, free in enumerate(room):
            if lengths[row] <= free:
                groups[index].append(row)
                room[index] -= lengths[row]
                break
        else:
            groups.append([row])
            room.append(limit - lengths[row])
    return groups


def _of_equal_length(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Neighbours in length together, each group padded to its first (longest) row."""
    groups: list[list[int]] = []
    for row in _longest_first(lengths):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= limit:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _balanced(lengths: Sequence[int], limit: int, count: int, costs: Sequence[float]) -> list[list[int]] | None:
    """Exactly `count` groups, dear rows first, each to the cheapest group with room; None if a row finds none."""
    groups: list[list[int]] = [[] for _ in range(count)]
    cheapest = [(0.0, index, limit) for index in range(count)]
    for row in sorted(range(len(lengths)), key=lambda row: (-costs[row], row)):
        full = []
        while cheapest and cheapest[0][2] < lengths[row]:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        cost, index, room = heapq.heappop(cheapest)
        groups[index].append(row)
        for entry in (*full, (cost + costs[row], index, room - lengths[row])):
            heapq.heappush(cheapest, entry)
    return groups if all(groups) else None


def _halve_the_largest(groups: list[list[int]], lengths: Sequence[int], packed: bool) -> None:
    def size(group: list[int]) -> int:
        if len(group) < 2:
            return 0
        return sum(lengths[row] for row in group) if packed else len(group) * max(lengths[row] for row in group)

    index = max(range(len(groups)), key=lambda i: (size(groups[i]), -i))
    order = sorted(groups[index], key=lambda row: (-lengths[row], row))
    half = len(order) // 2
    groups[index : index + 1] = [order[0::2], order[1::2]] if packed else [order[:half], order[half:]]
