"""The log, the timers, the progress line and the report."""

from __future__ import annotations

import io
import json
import math

import pytest

from rlhf_megatron.observe import report
from rlhf_megatron.observe.log import MetricsLog, read
from rlhf_megatron.observe.metrics import Max, Mean, Sum
from rlhf_megatron.observe.progress import Progress
from rlhf_megatron.observe.timers import Timers


def test_one_flushed_object_per_step(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"reward/mean": Mean(1, 2), "nothing": Mean(0, 0), "perf/memory_peak_mb": Max(5), "plain": 3})
        before_close = read(tmp_path)
        assert before_close == [{"step": 1, "reward/mean": 0.5, "perf/memory_peak_mb": 5.0, "plain": 3}]
        log.write(2, {"reward/mean": 0.25})
    assert [row["step"] for row in read(tmp_path)] == [1, 2]


def test_nan_and_infinity_are_null_named_and_said(tmp_path):
    said = io.StringIO()
    with MetricsLog(tmp_path, tensorboard=False, stream=said) as log:
        log.write(7, {"actor/loss": Mean(math.nan, 1), "actor/grad_norm": math.inf, "reward/mean": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    row = json.loads(text)
    assert row["actor/loss"] is None and row["reward/mean"] == 1.0
    assert row["not_finite"] == {"actor/loss": "nan", "actor/grad_norm": "inf"}
    assert "step 7" in said.getvalue() and "actor/loss = nan" in said.getvalue()


def test_resume_drops_what_will_be_repeated_and_a_torn_line(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in (1, 2, 3):
            log.write(step, {"x": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')
    with MetricsLog(tmp_path, resume_step=2, tensorboard=False) as log:
        log.write(3, {"x": 30})
    assert read(tmp_path) == [{"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 3, "x": 30}]


def test_a_fresh_run_keeps_the_old_log_beside_its_own(tmp_path):
    for run in range(3):
        with MetricsLog(tmp_path, tensorboard=False) as log:
            log.write(1, {"x": run})
    assert read(tmp_path) == [{"step": 1, "x": 2}]
    assert read(tmp_path / "metrics.1.jsonl") == [{"step": 1, "x": 0}]
    assert read(tmp_path / "metrics.2.jsonl") == [{"step": 1, "x": 1}]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read(tmp_path)


def test_tensorboard_gets_the_same_numbers(tmp_path):
    with MetricsLog(tmp_path, stream=io.StringIO()) as log:
        log.write(1, {"reward/mean": 0.5, "actor/loss": math.nan})
        log.write(2, {"reward/mean": 0.75})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.75)]
    assert "actor/loss" not in events.Tags()["scalars"]


def test_timers_add_up_and_start_afresh():
    now = iter([0.0, 2.0, 10.0, 13.0, 20.0, 21.0])
    started = []
    timers = Timers(on_start=started.append, clock=lambda: next(now))
    for _ in range(2):
        with timers("update"):
            pass
    with pytest.raises(RuntimeError), timers("generate"):
        raise RuntimeError
    assert timers.metrics() == {"timing/update": Sum(5.0), "timing/generate": Sum(1.0)}
    timers.reset()
    assert timers.metrics() == {} and started == ["update", "update", "generate"]


STEP = {"reward/mean": Mean(1, 2), "kl/ref": 0.0123, "perf/tokens_per_second": 1234.6, "timing/generate": Sum(1.25),
        "timing/update_actor": 2.0, "timing/step": 3.5}


def test_a_log_file_gets_one_plain_line_per_step():
    out = io.StringIO()
    with Progress(total=20, stream=out) as progress:
        progress.phase("generate")
        progress.step(3, STEP)
    assert out.getvalue() == (
        "step  3/20  reward 0.500  kl 0.0123  tokens/s 1,235  generate 1.2s update_actor 2.0s\n"
    )


def test_a_terminal_gets_a_live_line_too():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with Progress(total=4, start=1, stream=out) as progress:
        progress.phase("update_actor")
        progress.step(2, STEP)
        progress.live.refresh()
    progress.close()
    text = out.getvalue()
    assert "step 2/4  reward 0.500" in text
    assert "2/4  update_actor" in text and "left" in text


def test_report_draws_curves_and_says_where_time_went(tmp_path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 5):
            log.write(step, {"reward/mean": step / 4, "kl/ref": 0.01 * step, "actor/loss": -0.1, "timing/generate": 3.0,
                             "timing/update_actor": 1.0, "timing/step": 5.0})
    text = report.write(tmp_path)
    assert (tmp_path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert lines["generate"] == ["generate", "12.00", "3.000", "60.0%"]
    assert lines["other"] == ["other", "4.00", "1.000", "20.0%"]
    assert lines["total"][1] == "20.00"
    assert lines["reward/mean"][1:] == ["0.2500", "(step", "1)", "->", "1.0000", "(step", "4)"]
    (tmp_path / "metrics.jsonl").write_text("")
    assert "no finished step" in report.write(tmp_path)
    with pytest.raises(FileNotFoundError, match="no metrics log"):
        report.write(tmp_path / "elsewhere")
