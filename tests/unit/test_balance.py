"""Rows to parts: every row once, equal counts, the largest part as small as can be. No test looks at a clock."""

from __future__ import annotations

import heapq
import random
import statistics
import subprocess
import sys

import numpy as np
import pytest

from rlhf_megatron.data.balance import balance


def loads(costs, rows):
    return [sum(costs[i] for i in part) for part in rows]


def check(costs, rows, parts, equal_counts=True):
    """What holds for every result; returns the largest load."""
    assert len(rows) == parts and sorted(i for part in rows for i in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in rows)
    counts = [len(part) for part in rows]
    assert not equal_counts or max(counts) - min(counts) <= 1
    assert len(costs) < parts or min(counts) > 0
    return max(loads(costs, rows))


def best(costs, parts, equal_counts=True):
    """The smallest possible largest load, by trying everything."""
    costs = sorted(costs, reverse=True)
    share, extra = divmod(len(costs), parts) if equal_counts else (len(costs), 0)
    total, count, least = [0] * parts, [0] * parts, [sum(costs)]

    def place(row, extra):
        if row == len(costs):
            least[0] = min(least[0], max(total))
            return
        tried = set()
        for part in range(parts):
            more = count[part] == share
            state = (total[part], count[part])
            if count[part] > share or (more and not extra) or state in tried or total[part] + costs[row] >= least[0]:
                continue
            tried.add(state)
            total[part] += costs[row]
            count[part] += 1
            place(row + 1, extra - more)
            total[part] -= costs[row]
            count[part] -= 1

    place(0, extra)
    return least[0]


def largest_first(costs, parts):
    """Largest row first to the lightest part with room, and nothing else: the largest load."""
    share, extra = divmod(len(costs), parts)
    lightest, full = [(0, part, 0) for part in range(parts)], []
    for cost in sorted(costs, reverse=True):
        load, part, count = heapq.heappop(lightest)
        while count == share and not extra:
            full.append(load)
            load, part, count = heapq.heappop(lightest)
        extra -= count == share
        (full.append(load + cost) if count == share else heapq.heappush(lightest, (load + cost, part, count + 1)))
    return max([*full, *(load for load, _, _ in lightest)])


def lengths(rows, seed=0):
    """Log-normal token counts: median 665, a tail to 32,768."""
    drawn = np.random.default_rng(seed).normal(6.5, 1.0, rows)
    return np.clip(np.exp(drawn), 1, 32768).astype(np.int64).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_16384_rows_over_128_parts(seed):
    costs = lengths(16384, seed)
    rows = balance(costs, 128)
    assert {len(part) for part in rows} == {128}
    assert check(costs, rows, 128) * 128 / sum(costs) - 1 <= 0.0002  # 0.001 is wanted
    dear = [24576 * n + n * n for n in costs[:4096]]  # attention counted; the longest row is below the mean of a part
    assert check(dear, balance(dear, 32), 32) * 32 / sum(dear) - 1 <= 0.0002


def test_numbers_of_rows_that_do_not_divide():
    costs = lengths(1000)
    rows = balance(costs, 48)
    assert sorted({len(part) for part in rows}) == [20, 21] and sum(len(part) == 21 for part in rows) == 40
    assert check(costs, rows, 48) * 48 / sum(costs) - 1 <= 0.01


DRAW = {
    "log-normal": lambda rng: int(min(max(rng.lognormvariate(6.5, 1.0), 1), 32768)),
    "uniform": lambda rng: rng.randint(1, 1000),
    "few values": lambda rng: rng.randint(0, 5),
    "squares": lambda rng: rng.randint(1, 1000) ** 2,
    "fractions": lambda rng: rng.random(),
}


@pytest.mark.parametrize("kind", DRAW)
def test_close_to_the_best_of_all_assignments(kind):
    rng = random.Random(kind)
    for equal_counts in (True, False):
        ratios = []
        for _ in range(60):
            parts = rng.randint(2, 4)
            costs = [DRAW[kind](rng) for _ in range(rng.randint(1, 10))]
            least = best(costs, parts, equal_counts)
            found = check(costs, balance(costs, parts, equal_counts), parts, equal_counts)
            assert found >= least * (1 - 1e-12)
            ratios.append(found / least if least else 1.0)
        assert statistics.mean(ratios) <= 1.005 and max(ratios) <= 1.05


@pytest.mark.parametrize("kind", DRAW)
def test_never_worse_than_largest_first(kind):
    rng = random.Random(kind)
    better = 0
    for _ in range(400):
        parts = rng.randint(1, 9)
        costs = [DRAW[kind](rng) for _ in range(rng.randint(1, 60))]
        found, simple = check(costs, balance(costs, parts), parts), largest_first(costs, parts)
        assert found <= simple * (1 + 1e-12), (costs, parts)
        better += found < simple * (1 - 1e-9)
    assert kind == "few values" or better > 20


def test_exact_results():
    assert balance([8, 7, 2, 1], 2) == [[0, 3], [1, 2]]  # 9 and 9; cut in order it would be 15 and 3
    assert balance([4, 5, 6, 7, 8], 2) == [[0, 1, 2], [3, 4]]  # 15 and 15


def test_trades_find_what_largest_first_misses():
    costs = [7, 12, 11, 11, 1, 10]
    assert largest_first(costs, 2) == 29 and best(costs, 2) == 28
    assert balance(costs, 2) == [[0, 3, 5], [1, 2, 4]]  # 28 and 24


def test_fewer_rows_than_parts_leave_the_last_parts_empty():
    assert balance([3, 9, 5], 5) == [[1], [2], [0], [], []]
    assert balance([3, 9, 5], 5, equal_counts=False) == [[1], [2], [0], [], []]
    assert balance([], 2) == [[], []] == balance([], 2, equal_counts=False)


def test_equal_costs_and_rows_that_cost_nothing():
    assert loads([7] * 12, balance([7] * 12, 4)) == [21] * 4
    assert sorted(map(len, balance([7] * 14, 4))) == [3, 3, 4, 4]
    assert [len(part) for part in balance([0] * 6, 3)] == [2, 2, 2]
    assert [len(part) for part in balance([0] * 6, 3, equal_counts=False)] == [2, 2, 2]
    assert check([0, 0, 5, 0, 0, 5], balance([0, 0, 5, 0, 0, 5], 2), 2) == 5


def test_one_huge_row_is_with_the_smallest_ones():
    costs = [5, 1, 1000, 4, 3, 2, 6, 7]
    assert balance(costs, 2)[0] == [1, 2, 4, 5]  # 1000 + 1 + 2 + 3
    rows = balance(costs, 2, equal_counts=False)
    assert rows == [[2], [0, 1, 3, 4, 5, 6, 7]]


def test_free_counts_are_at_least_as_good_where_counts_bind():
    costs = [100, 1, 1, 1, 1, 1, 1, 94]
    assert check(costs, balance(costs, 2), 2) == 103
    assert check(costs, balance(costs, 2, equal_counts=False), 2, False) == 100


def test_one_part_has_everything_in_batch_order():
    assert balance([3, 1, 2], 1) == [[0, 1, 2]] == balance([3, 1, 2], 1, equal_counts=False)


def test_the_result_depends_on_the_arguments_only():
    code = ("import numpy as np, zlib; from rlhf_megatron.data.balance import balance;"
            "c = np.random.default_rng(5).random(3000).tolist(); print(zlib.crc32(repr(balance(c, 17)).encode()))")
    outputs = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
                              env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}).stdout for seed in ("1", "2")}
    assert len(outputs) == 1
    costs = lengths(500)
    assert balance(costs, 7) == balance(tuple(costs), 7) == balance(np.array(costs), 7)
    assert balance(costs, 7) == balance([3.0 * cost for cost in costs], 7)  # the unit does not matter


@pytest.mark.parametrize(("costs", "parts", "message"), [
    ([1], 0, r"parts=0: must be at least 1"),
    ([1, -2], 1, r"costs\[1\]=-2.0: .*at least 0"),
    ([float("nan")], 1, r"costs\[0\]=nan"),
    ([1, 2, float("inf")], 2, r"costs\[2\]=inf: .*finite"),
])
def test_wrong_arguments_are_named(costs, parts, message):
    with pytest.raises(ValueError, match=message):
        balance(costs, parts)
