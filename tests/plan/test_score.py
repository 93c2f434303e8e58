"""Scores are what their definitions say, whatever the order of rows; a file comes back with nothing else changed."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rows import LINE, changed, lines, table

from espalier.cli import measurements as verb
from espalier.plan.calibration import DATASHEET, Calibration, calibrate
from espalier.plan.calibration_factors import PLAIN
from espalier.plan.measurements import score
from espalier.plan.measurements.table import MeasuredRow, MeasuredTable, read
from espalier.recipe.errors import UserError

LAYOUTS = ("1,8,1", "2,4,1", "4,2,1", "2,2,2", "1,2,4")


@pytest.fixture
def rows(tmp_path: Path) -> list[MeasuredRow]:
    """Five layouts of each of two batches, measured exactly as predicted."""
    body = [f"8,{batch},1,2048,16,24,1024,{layout},1" for batch in (16, 32) for layout in LAYOUTS]
    found = read(table(tmp_path, *body)).rows
    taken = [one.seconds for one in score.predict([row.measurement for row in found])]
    return [measured(row, seconds) for row, seconds in zip(found, taken, strict=True)]


def measured(
    row: MeasuredRow, seconds: float | None, out_of_memory: bool | None = None, peak: float | None = None
) -> MeasuredRow:
    one = replace(row.measurement, step_seconds=seconds, out_of_memory=out_of_memory, peak_bytes=peak)
    return replace(row, measurement=one)


def seconds(row: MeasuredRow) -> float:
    assert row.measurement.step_seconds is not None
    return row.measurement.step_seconds


def test_perfect_predictions_have_no_error_and_no_regret(rows: list[MeasuredRow]) -> None:
    found = score.score(rows, DATASHEET)
    assert found.mape == pytest.approx(0)
    assert found.spearman == pytest.approx(1)
    assert (found.groups, found.groups_of_three, found.largest_regret) == (2, 2, 0)
    assert found.regret_interval == (0, 0)


def test_slow_machines_are_an_error_of_time_not_of_choice(rows: list[MeasuredRow]) -> None:
    found = score.score([measured(row, 2 * seconds(row)) for row in rows], DATASHEET)
    assert found.mape == pytest.approx(0.5)
    assert found.bias == pytest.approx(-0.5)
    assert found.spearman == pytest.approx(1)
    assert found.mean_regret == 0


def test_regret_is_what_the_chosen_layout_loses_to_the_best(rows: list[MeasuredRow]) -> None:
    """In one group the predicted best takes three times as long as it should; in the other all is as predicted."""
    group = [row for row in rows if row.group == rows[0].group]
    best = min(group, key=seconds)
    second = min((row for row in group if row is not best), key=seconds)
    slow = [measured(row, 3 * seconds(best)) if row is best else row for row in rows]
    found = score.score(slow, DATASHEET)
    lost = 3 * seconds(best) / seconds(second) - 1
    assert found.largest_regret == pytest.approx(lost)
    assert found.mean_regret == pytest.approx(lost / 2)
    low, high = found.regret_interval or (1, 0)
    assert low == 0 < high <= found.largest_regret


def test_groups_of_two_count_in_the_mean_but_not_in_the_interval(rows: list[MeasuredRow]) -> None:
    found = score.score(rows[:2] + rows[5:], DATASHEET)
    assert (found.groups, found.groups_of_three) == (2, 1)
    alone = score.score(rows[:1], DATASHEET)
    assert (alone.groups, alone.mean_regret, alone.regret_interval, alone.spearman) == (0, None, None, None)


def test_the_order_of_rows_does_not_matter(rows: list[MeasuredRow]) -> None:
    noisy = [measured(row, seconds(row) * (1 + 0.3 * (at % 3))) for at, row in enumerate(rows)]
    left, right = score.score(noisy, DATASHEET), score.score(noisy[::-1], DATASHEET)
    assert left.mape == pytest.approx(right.mape)
    assert (left.spearman, left.largest_regret) == pytest.approx((right.spearman, right.largest_regret))


def test_rows_out_of_memory_count_only_where_memory_is_asked(rows: list[MeasuredRow]) -> None:
    best = min(rows, key=seconds)
    broken = [measured(row, None, out_of_memory=True) if row is best else row for row in rows]
    found = score.score(broken, DATASHEET)
    assert (found.timed, found.labelled, found.largest_regret) == (9, 10, 0)
    assert (found.false_fits, found.false_misfits, found.chosen_out_of_memory) == (1, 0, 1)


def test_a_layout_that_ran_though_predicted_not_to_fit_is_counted(rows: list[MeasuredRow]) -> None:
    predictions = [one._replace(over=1.0) for one in score.predict([row.measurement for row in rows])]
    found = score.score(rows, DATASHEET, predictions)
    assert (found.false_fits, found.false_misfits, found.chosen_out_of_memory) == (0, 10, 0)


def test_memory_is_scored_where_it_was_measured(rows: list[MeasuredRow]) -> None:
    peaks = [one.peak for one in score.predict([row.measurement for row in rows])]
    full = [measured(row, 1.0, peak=1.25 * peak) for row, peak in zip(rows[:3], peaks, strict=False)] + rows[3:]
    found = score.score(full, DATASHEET)
    assert (found.memory_rows, found.memory_mape) == (3, pytest.approx(0.2))


def test_terms_add_up_and_the_slowest_device_decides(rows: list[MeasuredRow]) -> None:
    for one in score.predict([row.measurement for row in rows]):
        assert sum(one.terms.values()) == pytest.approx(one.seconds)


def test_the_interval_holds_the_mean_and_is_the_same_twice() -> None:
    values = [0.0, 0.1, 0.02, 0.4, 0.0, 0.05]
    low, high = score.interval(values)
    assert low < np.mean(values) < high
    assert score.interval(values) == (low, high)
    assert score.interval([0.1] * 4) == pytest.approx((0.1, 0.1))


# --- the file beside ---------------------------------------------------------------------------------------------


def written(found: MeasuredTable, calibration: Calibration = DATASHEET) -> str:
    return score.with_predictions(found, score.predict(found.measurements, calibration.factors), calibration)


def test_a_csv_comes_back_with_one_column_more(tmp_path: Path) -> None:
    path = table(tmp_path, LINE, LINE.replace("8,32", "8,64"))
    text = written(read(path))
    given, found = (list(csv.DictReader(one.splitlines())) for one in (path.read_text(), text))
    predicted = [float(row.pop("predicted_ms")) for row in found]
    assert found == given
    assert text.splitlines()[0].endswith(",iter_ms,predicted_ms")
    truth = score.predict(read(path).measurements)
    assert predicted == pytest.approx([one.seconds * 1000 for one in truth], rel=1e-5)


def test_json_lines_come_back_with_predicted_in_the_calibrations_band(tmp_path: Path) -> None:
    row = {"id": 7, **changed()}
    calibration = Calibration(factors=PLAIN, spread=0.1, rows=9)
    found = json.loads(written(read(lines(tmp_path, row)), calibration))
    predicted = found.pop("predicted")
    assert found == row
    assert predicted["low"] == pytest.approx(predicted["step_seconds"] / 1.1)
    assert predicted["high"] == pytest.approx(predicted["step_seconds"] * 1.1)
    assert sum(predicted["terms"].values()) == pytest.approx(predicted["step_seconds"])
    assert predicted["fits"] == (predicted["peak_gib"] < 0.92 * 79)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_scoring_what_was_scored_changes_nothing(tmp_path: Path, form: str) -> None:
    path = table(tmp_path, LINE) if form == "csv" else lines(tmp_path, changed())
    once = written(read(path))
    path.write_text(once)
    assert written(read(path)) == once


# --- the verb ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "hint"), [(1000, "divide"), (0.001, "multiply")])
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_other_units_are_refused_before_anything_is_written(
    tmp_path: Path, rows: list[MeasuredRow], form: str, factor: float, hint: str
) -> None:
    if form == "csv":
        taken = score.predict([row.measurement for row in rows])[0].seconds * 1000 * factor
        path, unit = table(tmp_path, f"8,16,1,2048,16,24,1024,1,8,1,{taken}"), "milliseconds"
    else:
        path, unit = lines(tmp_path, changed(measured={"step_seconds": 2.0 * factor})), "seconds"
    with pytest.raises(UserError, match=hint) as error:
        verb.run(str(path), None, None, False)
    assert f"must be in {unit}" in str(error.value)
    assert path.name in str(error.value)
    assert not list(tmp_path.glob("*.scored.*"))


def test_the_rows_go_beside_the_file_and_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = lines(tmp_path, changed(), changed(layout={"dp": 8, "tp": 2, "accumulate": 2}))
    assert verb.run(str(path), None, None, True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["out"] == str(tmp_path / "rows.scored.jsonl")
    assert told["scores"]["rows"] == len(Path(told["out"]).read_text().splitlines()) == 2
    assert verb.run(str(path), None, str(tmp_path / "other"), False) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("MAPE", "Spearman", "regret", "memory", 'false "fits"'))
    assert (tmp_path / "other").read_text() == Path(told["out"]).read_text()


def test_where_nothing_can_be_written_is_said_first(tmp_path: Path) -> None:
    path = table(tmp_path, LINE)
    for out in (tmp_path / "no" / "x.csv", tmp_path, path):
        with pytest.raises(UserError, match="--out"):
            verb.run(str(path), None, str(out), False)
    assert [one.name for one in tmp_path.iterdir()] == ["rows.csv"]


# --- the real table ----------------------------------------------------------------------------------------------


def test_datasheets_alone_order_real_runs(data_folder: Path) -> None:
    found = read(data_folder / "calibration" / "gpt_a100_one_node.csv")
    assert (score.score(found.rows, DATASHEET).spearman or 0) > 0.9


@pytest.mark.slow
def test_a_fifth_of_the_real_runs_predicts_the_rest(data_folder: Path) -> None:
    found = read(data_folder / "calibration" / "gpt_a100_one_node.csv")
    order = np.random.default_rng(0).permutation(len(found.rows))
    fifth = len(order) // 5
    calibration = calibrate([found.rows[at].measurement for at in order[:fifth]])
    scores = score.score([found.rows[at] for at in order[fifth:]], calibration)
    assert (scores.mape or 1) <= 0.08
    assert (scores.spearman or 0) >= 0.985
