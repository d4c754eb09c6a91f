"""Metrics merge exactly: pooled sums, whatever the split; nothing is ever a silent NaN."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rlhf_megatron.observe import metrics
from rlhf_megatron.observe.metrics import Max, Mean, Min, Sum


def test_clip_fraction_of_two_ranks_is_pooled_not_averaged():
    merged = metrics.merge([{"f": Mean(2, 10)}, {"f": Mean(4, 5)}])
    assert merged["f"].value == pytest.approx(0.4)  # the mean of the two means would be 0.5


def test_a_rank_without_tokens_changes_nothing():
    empty = {"f": Mean(0, 0), "high": Max(None), "low": Min(None)}
    full = {"f": Mean(3, 4), "high": Max(2.5), "low": Min(-1.0)}
    for order in ([empty, full], [full, empty], [empty, full, empty]):
        merged = metrics.merge(order)
        assert metrics.values(merged) == {"f": 0.75, "high": 2.5, "low": -1.0}
    assert metrics.values(metrics.merge([empty])) == {}


def test_merge_does_not_depend_on_order():
    reports = [{"m": Mean(1, 2), "s": Sum(1), "x": Max(1), "n": Min(1)}, {"m": Mean(5, 8), "s": Sum(2), "x": Max(7)},
               {"m": Mean(0, 6), "n": Min(-3), "x": Max(2)}]
    results = [metrics.values(metrics.merge(order)) for order in itertools.permutations(reports)]
    assert all(result == results[0] for result in results)
    assert results[0] == {"m": 6 / 16, "s": 3.0, "x": 7.0, "n": -3.0}


def test_nan_in_the_data_stays_visible_in_extrema():
    for order in itertools.permutations([Max(1.0), Max(math.nan), Max(2.0)]):
        assert math.isnan(metrics.merge({"x": m} for m in order)["x"].value)


def test_one_name_has_one_kind():
    with pytest.raises(TypeError, match="'loss'.*Mean.*Sum"):
        metrics.merge([{"loss": Mean(1, 1)}, {"loss": Sum(1)}])


def test_wire_form_is_plain_and_comes_back():
    report = {"m": Mean(torch.tensor(6), torch.tensor(15.0, requires_grad=True)), "s": Sum(2), "x": Max(None),
              "n": Min(1)}
    lists = metrics.to_lists(report)
    assert lists == {"m": ["mean", 6.0, 15.0], "s": ["sum", 2.0], "x": ["max", None], "n": ["min", 1.0]}
    assert metrics.from_lists(lists) == report
    for bad in ([], ["median", 1.0], ["mean", 1.0]):
        with pytest.raises(ValueError, match="not a metric"):
            metrics.from_list(bad)
