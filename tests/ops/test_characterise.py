"""Figures of a trace: shares add up, the curve's area is the GPU time, the shared subset fits the published summary."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.ops.job_trace import Jobs, characterise, curve, read

TIMES = st.floats(0, 1e6)


@given(st.lists(st.tuples(TIMES, st.floats(0.01, 1e5), st.integers(1, 1024)), min_size=1, max_size=40))
def test_the_area_of_the_curve_is_the_gpu_time(rows):
    started, seconds, gpus = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    hours, in_use, most, span = curve(started, seconds, gpus)
    assert in_use.sum() * span / len(in_use) == pytest.approx(float(gpus @ seconds), rel=1e-6)
    assert in_use.max() <= most * (1 + 1e-9)
    assert most <= gpus.sum()
    assert np.all(np.diff(hours) > 0)


def test_a_job_that_begins_as_another_ends_does_not_count_twice():
    _, _, most, span = curve(np.array([0.0, 10.0]), np.array([10.0, 10.0]), np.array([8.0, 8.0]))
    assert (most, span) == (8.0, 20.0)


def test_without_times_there_is_no_curve():
    hours, in_use, most, span = curve(np.array([np.nan]), np.array([5.0]), np.array([1.0]))
    assert (len(hours), len(in_use), most, span) == (0, 0, 0.0, 0.0)


def made(count, seed):
    draw = np.random.default_rng(seed)
    states = draw.choice(["COMPLETED", "FAILED", "CANCELLED"], count)
    return Jobs(
        source="x",
        gpus=draw.integers(0, 9, count).astype(float),
        kinds=draw.choice(["Eval", "Pretrain"], count),
        states=states,
        causes=np.where(states == "FAILED", draw.choice(["exit code 1", "signal 9"], count), ""),
        submitted=draw.uniform(0, 1e5, count),
        started=draw.uniform(0, 1e5, count),
        seconds=draw.uniform(1, 1e4, count),
        queued=draw.uniform(0, 100, count),
    )


@given(st.integers(5, 200), st.integers(0, 2**32 - 1))
def test_shares_add_up_and_jobs_without_gpus_are_apart(count, seed):
    trace = made(count, seed)
    found = characterise(trace)
    assert found.jobs + found.cpu_jobs == count
    for groups in (found.kinds, found.states):
        if found.jobs:
            assert sum(one.share for one in groups) == pytest.approx(1)
            assert sum(one.time_share for one in groups) == pytest.approx(1)
            assert sum(one.gpu_seconds for one in groups) == pytest.approx(found.gpu_seconds)
    failed = (trace.states == "FAILED") & (trace.gpus > 0)
    assert sum(one.jobs for one in found.causes) == int(failed.sum())


def test_the_shared_subset_has_the_published_cluster_in_it(data_folder):
    folder = data_folder / "acme"
    if not folder.is_dir():
        pytest.skip("no trace beside the tables")
    trace = read(folder / "kalos_completed_jobs.csv")
    found = characterise(trace)
    with (folder / "cluster_summary.csv").open() as file:
        kalos = next(row for row in csv.DictReader(file) if row["id"] == "Kalos")
    # A part of the completed jobs: no more GPU time and jobs than the whole cluster completed, and its largest job.
    assert found.gpu_seconds <= float(kalos["complete_gpu_time"])
    assert found.jobs <= float(kalos["complete_rate_gpu"]) * int(kalos["gpu_job_num"])
    assert trace.gpus.max() == float(kalos["max_gpu"])
    assert found.gpu_seconds == pytest.approx(float(trace.gpus @ trace.seconds))
    # Pretraining is nearly all GPU time: 94.0 % of Kalos's in the study, over all types; here some types are missing.
    pretrain = next(one for one in found.kinds if one.name == "Pretrain")
    assert pretrain.time_share == pytest.approx(0.94, abs=0.03)
