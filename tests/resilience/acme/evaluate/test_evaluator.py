"""Workers that die, stop, raise or dawdle: each record is scored once, and the figures are the same to the last bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from made_tasks import Made, die, evaluated, once, slow, stop

from espalier.resilience.acme.evaluate.evaluator import joined
from espalier.resilience.acme.evaluate.packing import Pool


def made(folder: Path, **acts) -> list[Made]:
    seen = folder / "seen"
    return [Made("big", 40, seen, **acts), Made("small", 3, seen), Made("other", 2, seen)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return {name: result.figures for name, result in evaluated(folder, made(folder), Pool(1, 1)).items()}


def figures(results):
    return {name: result.figures for name, result in results.items()}


def test_figures_do_not_depend_on_how_many_workers_there_are(tmp_path: Path, plain) -> None:
    found = evaluated(tmp_path, made(tmp_path, act=slow(0.01)), Pool(3, 2))
    assert figures(found) == plain
    assert {name: result.records for name, result in found.items()} == {"big": 40, "small": 3, "other": 2}
    assert len({pid for _, pid in made(tmp_path)[0].lines("infer")}) > 1


def test_a_worker_killed_within_a_trial_costs_no_record_and_none_is_scored_twice(tmp_path: Path, plain) -> None:
    deaths: list[int] = []
    tasks = made(tmp_path, act=once(tmp_path / "killed", 17, die))
    assert figures(evaluated(tmp_path, tasks, deaths=deaths)) == plain
    assert deaths == [1]
    scored = Counter(int(record) for record, _ in tasks[0].lines("score"))
    assert scored == Counter(range(40))


def test_a_stopped_worker_is_replaced(tmp_path: Path, plain) -> None:
    deaths: list[int] = []
    assert figures(evaluated(tmp_path, made(tmp_path, act=once(tmp_path / "stopped", 9, stop)), deaths=deaths)) == plain
    assert deaths == [1]


def test_a_metric_worker_that_dies_is_replaced_and_the_file_is_scored_anew(tmp_path: Path, plain) -> None:
    deaths: list[int] = []
    tasks = made(tmp_path, act_scoring=once(tmp_path / "killed", 5, die))
    assert figures(evaluated(tmp_path, tasks, deaths=deaths)) == plain
    assert deaths == [1]
    assert Counter(int(record) for record, _ in tasks[0].lines("infer")) == Counter(range(40))


def test_a_task_that_raises_or_kills_is_given_up_and_the_others_are_done(tmp_path: Path, plain) -> None:
    def broken(record: int) -> None:
        if record == 2:
            raise ValueError("no such prompt")

    def deadly(record: int) -> None:
        if record == 1:
            die()

    seen = tmp_path / "seen"
    tasks = [*made(tmp_path), Made("broken", 9, seen, broken), Made("deadly", 4, seen, deadly)]
    tasks.append(Made("unscorable", 3, seen, act_scoring=broken))
    found = evaluated(tmp_path, tasks)
    assert "no such prompt" in found["broken"].why
    assert "ended 3 workers" in found["deadly"].why
    assert "no such prompt" in found["unscorable"].why
    assert {name: found[name].figures for name in plain} == plain


def test_an_idle_worker_gets_half_of_what_another_has_left(tmp_path: Path) -> None:
    """The prior says the task is quick, so that it is one trial; it is not."""
    task = Made("wrong", 20, tmp_path / "seen", act=slow(0.1))
    (tmp_path / "priors.json").write_text('{"wrong": {"inference": 1e-6, "metric": 0.0, "trials": 5}}')
    evaluated(tmp_path, [task])
    by_worker = Counter(pid for _, pid in task.lines("infer"))
    assert len(by_worker) == 2
    assert min(by_worker.values()) >= 4


def test_inference_does_not_wait_for_metrics(tmp_path: Path) -> None:
    task = Made("slow", 20, tmp_path / "seen", act=slow(0.02), act_scoring=slow(0.05))
    evaluated(tmp_path, [task], Pool(1, 1))
    order = [line.split()[0] for line in task.seen.read_text().splitlines()]
    assert order.index("score") < len(order) - 1 - order[::-1].index("infer")  # scoring began before inference ended


def test_sums_are_joined_exactly_and_what_has_no_weight_is_left_out() -> None:
    sums = [{"a": (1e16, 1.0)}, {"a": (1.0, 1.0), "b": (0.0, 0.0)}, {"a": (-1e16, 1.0)}]
    assert joined(sums) == {"a": 1 / 3}
