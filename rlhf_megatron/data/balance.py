"""Rows to parts of equal cost and equal number: what each replica of a layout gets.

First longest-processing-time-first (Graham 1969, https://doi.org/10.1137/0117039) with a limit on a part's rows: each
row, largest first, to the lightest part that may still take one. Then the heaviest part trades one row with a light
part, the pair that brings the two closest together, until no trade lowers the largest cost. Loads are float64: exact
for integers up to 2^53.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

CLOSE = 1e-4  # relative: a largest part this near to what is possible costs less than the search for a better one


def balance(costs: Sequence[float], parts: int, equal_counts: bool = True) -> list[list[int]]:
    """Assign rows to parts so that the largest part's cost is small. Depends on nothing but its arguments.

    Args:
        costs: of every row, at least 0; any unit.
        parts: how many; with fewer rows than parts the last ones stay empty.
        equal_counts: parts have equal numbers of rows within one. False: any numbers, but no part is empty while
            there are as many rows as parts.

    Returns:
        Rows of each part, in batch order. Every row is in exactly one part.

    Raises:
        ValueError: parts below 1; a cost that is negative, infinite or NaN.
    """
    if parts < 1:
        raise ValueError(f"parts={parts}: must be at least 1")
    values = np.asarray(costs, dtype=np.float64)
    wrong = np.flatnonzero(~((values >= 0) & (values < np.inf)))
    if len(wrong):
        raise ValueError(f"costs[{wrong[0]}]={values[wrong[0]]}: a row's cost must be finite and at least 0")
    share, extra = divmod(len(values), parts) if equal_counts else (len(values), 0)
    rows = _largest_first(values, parts, share, extra)
    if parts > 1:
        rows = _Trades(values, rows, equal_counts).run()
    return [sorted(part) for part in rows]


def _largest_first(costs: np.ndarray, parts: int, share: int, extra: int) -> list[list[int]]:
    """At most `share` rows a part, and one more in `extra` of them; rows of a part by falling cost."""
    rows: list[list[int]] = [[] for _ in range(parts)]
    # load, then the number of rows (rows that cost nothing spread, too), then the part
    lightest = [(0.0, 0, part) for part in range(parts)]
    order = np.argsort(-costs, kind="stable")
    for row, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        while lightest[0][1] == share and extra == 0:
            heapq.heappop(lightest)  # full, and no extra row is left
        load, count, part = lightest[0]
        rows[part].append(row)
        if count < share:
            heapq.heapreplace(lightest, (load + cost, count + 1, part))
        else:
            extra -= 1
            heapq.heappop(lightest)
    return rows


class _Trades:
    """Trades of rows between the heaviest part and light ones. Keeps each part's rows and costs by rising cost."""

    def __init__(self, costs: np.ndarray, rows: list[list[int]], equal_counts: bool) -> None:
        self.rows = [np.array(part[::-1], dtype=np.int64) for part in rows]
        self.costs = [costs[part] for part in self.rows]
        self.loads = np.array([part.sum() for part in self.costs])
        self.equal_counts = equal_counts
        # No assignment is below the mean, nor below the largest row and the smallest ones that must be with it.
        others = len(costs) // len(rows) - 1 if equal_counts else 0
        least = float(np.sort(costs)[: max(others, 0)].sum() + costs.max()) if len(costs) else 0.0
        self.enough = max(costs.sum() / len(rows), least) * (1 + CLOSE)
        # A search through all parts without a trade is the end; this bounds searches that find one late.
        self.searches = 1000 + 8 * len(rows)

    def run(self) -> list[list[int]]:
        while self.searches > 0 and self.loads.max() > self.enough and self._lower_the_largest():
            pass
        return [part.tolist() for part in self.rows]

    def _lower_the_largest(self) -> bool:
        """One trade of the heaviest part, with the lightest part that has one for it. False: nobody has."""
        heavy = int(self.loads.argmax())
        for light in np.argsort(self.loads, kind="stable").tolist():
            if self.loads[light] == self.loads[heavy]:
                return False
            self.searches -= 1
            if self._trade(heavy, light):
                return True
        return False

    def _trade(self, heavy: int, light: int) -> bool:
        """The trade after which the larger of two parts is smallest, if that is less than now."""
        gap = self.loads[heavy] - self.loads[light]
        theirs = self.costs[light]
        nothing = not self.equal_counts or len(self.rows[heavy]) > len(self.rows[light])  # a row may go for nothing
        if nothing:
            theirs = np.concatenate([[0.0], theirs])
        mine = self.costs[heavy]
        above = np.searchsorted(theirs, mine - gap / 2).clip(0, len(theirs) - 1)
        below = (above - 1).clip(0)
        moved = np.concatenate([mine - theirs[above], mine - theirs[below]])  # what the heavy part loses
        best = int(np.abs(moved - gap / 2).argmin())
        change, give = moved[best], best % len(mine)
        take = int(np.concatenate([above, below])[best]) - nothing
        if max(self.loads[heavy] - change, self.loads[light] + change) >= self.loads[heavy]:
            return False
        given = self._take(heavy, give)
        if take >= 0:
            self._put(heavy, *self._take(light, take))
        self._put(light, *given)
        self.loads[heavy] -= change
        self.loads[light] += change
        return True

    def _take(self, part: int, at: int) -> tuple[int, float]:
        row, cost = int(self.rows[part][at]), float(self.costs[part][at])
        self.rows[part] = np.delete(self.rows[part], at)
        self.costs[part] = np.delete(self.costs[part], at)
        return row, cost

    def _put(self, part: int, row: int, cost: float) -> None:
        at = int(np.searchsorted(self.costs[part], cost))
        self.rows[part] = np.insert(self.rows[part], at, row)
        self.costs[part] = np.insert(self.costs[part], at, cost)
