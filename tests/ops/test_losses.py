"""Losses: a departure that lasts is found where it begins; blips, noise, learning and zero are none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.ops.diagnosis import departure, diagnose
from espalier.ops.log_scan.scan import Loss


def series(values):
    return [Loss(at + 1, float(value), b"") for at, value in enumerate(values)]


@given(st.integers(12, 300), st.integers(3, 200), st.floats(1.7, 20), st.integers(0, 2**32 - 1))
def test_a_departure_is_found_at_its_first_loss(before, after, times, seed):
    draw = np.random.default_rng(seed)
    values = np.concatenate([2 + 0.02 * draw.standard_normal(before), 2 * times + 0.02 * draw.standard_normal(after)])
    found = departure(series(values))
    assert found is not None
    assert found.number == before + 1


@given(st.integers(20, 300), st.integers(0, 2**32 - 1), st.floats(0.0, 0.05))
def test_noise_and_learning_are_no_departure(count, seed, noise):
    draw = np.random.default_rng(seed)
    values = (2 + 9 * np.exp(-np.arange(count) / 30)) * (1 + noise * draw.standard_normal(count))
    assert departure(series(values)) is None


@given(st.integers(20, 100), st.integers(5, 60), st.integers(1, 2))
def test_a_blip_that_comes_back_is_none(before, after, wide):
    assert departure(series([2.0] * before + [9.0] * wide + [2.0] * after)) is None


@pytest.mark.parametrize(
    "values", [[], [2.0] * 5 + [9.0] * 3, [0.0] * 20 + [5.0] * 20, [-1.0] * 20 + [5.0] * 20, [2.0] * 40]
)
def test_short_and_signless_series_say_nothing(values):
    assert departure(series(values)) is None


SOUND = [f"{{'loss': {3 - 0.02 * at:.2f}, 'grad_norm': 1.1, 'epoch': {at / 100}}}" for at in range(40)]
SUMMARY = "{'train_runtime': 812.5, 'train_samples_per_second': 9.8, 'train_loss': 1.3, 'epoch': 1.0}"


@pytest.mark.parametrize(
    "bad",
    [
        "{'loss': nan, 'grad_norm': nan, 'epoch': 0.4}",
        "{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.4}",
        "{'loss': 'nan', 'grad_norm': '1.2', 'epoch': '0.4'}",
    ],
)
@pytest.mark.parametrize("end", [[], [SUMMARY]])
def test_runs_of_hugging_faces_trainer_whose_loss_is_no_number_any_more(tmp_path, bad, end):
    log = tmp_path / "log"
    log.write_text("\n".join([*SOUND, *[bad] * 40, *end]) + "\n")
    (diagnosis,) = diagnose(log)
    assert diagnosis.reason == "Loss Anomaly"
    assert diagnosis.evidence[0].line == 41


@pytest.mark.parametrize("end", ["{'loss': 0.0, 'grad_norm': 0.3}", "{'loss': 2.2, 'grad_norm': nan}"])
def test_a_loss_of_zero_and_a_step_that_was_skipped_are_none(tmp_path, end):
    log = tmp_path / "log"
    log.write_text("\n".join([*SOUND, end, SUMMARY]) + "\n")
    assert [diagnosis.reason for diagnosis in diagnose(log)] == ["No Failure"]
