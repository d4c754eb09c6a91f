"""Micro-batches by rows and by tokens: a strict limit, every row once, a count that can be asked for."""

import random

import pytest

from rlhf_megatron.data.packing import by_rows, by_tokens


def size(group, lengths, packed):
    held = [lengths[row] for row in group]
    return sum(held) if packed else len(held) * max(held, default=0)


def test_the_limit_is_strict_where_a_quotient_of_sums_would_break_it():
    assert by_tokens([7] * 8, 8, packed=True) == [[row] for row in range(8)]  # 56 / 8 = 7 would hold one of 14
    assert by_tokens([7] * 8, 8, packed=False) == [[row] for row in range(8)]
    assert by_tokens([4] * 8, 8, packed=True) == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_above_the_limit_is_an_error(packed):
    with pytest.raises(ValueError, match=r"row 1 has 9 tokens, more than micro_batch_tokens\(8\)"):
        by_tokens([8, 9], 8, packed)


@pytest.mark.parametrize("packed", [False, True])
def test_a_light_rank_forms_as_many_as_the_busiest(packed):
    assert len(by_tokens([8, 8, 8, 8], 8, packed)) == 4
    assert sorted(by_tokens([2, 2, 2, 2], 8, packed, count=4)) == [[0], [1], [2], [3]]
    assert by_tokens([2], 8, packed, count=4) == [[0], [], [], []]
    assert by_tokens([], 8, packed, count=2) == [[], []]


@pytest.mark.parametrize("packed", [False, True])
def test_random_rows(packed):
    draw = random.Random(3)
    for _ in range(300):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 30))]
        limit = draw.randint(max(lengths), 90)
        groups = by_tokens(lengths, limit, packed, quadratic=draw.choice([0.0, 0.1]))
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
        assert all(group and size(group, lengths, packed) <= limit for group in groups)
        more = by_tokens(lengths, limit, packed, count=len(groups) + 3)
        assert len(more) == len(groups) + 3
        assert sorted(row for group in more for row in group) == list(range(len(lengths)))
        assert all(size(group, lengths, packed) <= limit for group in more)
        assert sum(map(bool, more)) == min(len(more), len(lengths)), "a micro-batch is empty only when rows run out"


def test_packed_micro_batches_are_balanced_by_cost():
    lengths = [8, 1, 1, 1, 1, 1, 1, 1, 1]
    by_length = by_tokens(lengths, 12, packed=True)
    assert sorted(size(group, lengths, True) for group in by_length) == [8, 8]
    by_square = by_tokens(lengths, 8, packed=True, quadratic=1.0)
    assert [0] in by_square  # 8^2 outweighs the rest


def test_rows_of_about_equal_length_share_a_micro_batch():
    assert by_rows([3, 9, 1, 8, 2], 2) == [[1, 3], [0, 4], [2]]
    assert by_rows([3, 9, 1], 2, count=3) == [[0, 1], [2], []]
    assert by_tokens([3, 9, 1, 8, 2], 18, packed=False) == [[1, 3], [0, 2, 4]]
    with pytest.raises(ValueError, match="micro_batch_size=0"):
        by_rows([1], 0)
