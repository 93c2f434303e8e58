"""How good are the planner's predictions? Compares them with measured rows, and writes them beside those. No torch.

Regret is what a plan chosen by prediction loses to the best measured one, among rows of one model, batch and number of
devices. Its mean is given with a bootstrap interval over groups (percentiles; Efron 1979), as groups are few.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from espalier.plan.calibration import Batch, Calibration, Measurement, refuse_other_units
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.layout_estimate import Priced, price
from espalier.plan.measurements.table import PREDICTED, MeasuredRow, MeasuredTable
from espalier.recipe.cost import Number

RESAMPLES = 10_000
RETURNED = 0.7
"""Share of the allocator's loss that it returns before it fails: GPTs up to the first batch that did not fit."""
SPLIT = 0.07
"""Share by which its largest buffers, which need room in one piece, then take more."""
SMALLEST_GROUP = 3
"""Rows of a group whose regret says something: of two, a coin would choose the better half of the time."""

Progress = Callable[[int, int], None]


class Prediction(NamedTuple):
    """Of one row: seconds of a step and their parts, peak bytes, and bytes that it lacks (negative: room left)."""

    seconds: float
    peak: float
    over: float
    terms: Mapping[str, float]

    @property
    def fits(self) -> bool:
        """Whether the tightest rank has room."""
        return self.over <= 0


class Scores(Struct, frozen=True, kw_only=True):
    """Predictions against measurements; None where the rows say nothing of it. Errors and regrets are relative.

    Attributes:
        rows, timed: rows in all, and rows with a measured time.
        mape: mean absolute error of seconds; bias: median of predicted over measured, less 1.
        spearman: rank correlation of seconds.
        groups: of at least two timed rows; mean_regret, largest_regret: over them.
        groups_of_three: of at least three; regret_of_three, regret_interval: mean over them and its 95 % interval.
        memory_rows: rows with a measured peak; memory_mape: of those.
        labelled: rows that say whether memory sufficed; false_fits: predicted to fit, ran out of memory;
            false_misfits: predicted not to fit, ran; chosen_out_of_memory: groups whose chosen plan ran out.
    """

    rows: int
    timed: int
    mape: float | None = None
    bias: float | None = None
    spearman: float | None = None
    covered: float | None = None
    """Share of measured times that lie in the predictions' own bands."""
    groups: int = 0
    mean_regret: float | None = None
    largest_regret: float | None = None
    groups_of_three: int = 0
    regret_of_three: float | None = None
    regret_interval: tuple[float, float] | None = None
    memory_rows: int = 0
    memory_mape: float | None = None
    labelled: int = 0
    false_fits: int = 0
    false_misfits: int = 0
    chosen_out_of_memory: int = 0


def predict(
    rows: Sequence[Measurement], factors: CostFactors = PLAIN, progress: Progress | None = None
) -> list[Prediction]:
    """What each measured layout should take, in the order of `rows`; `progress(done, total)` is called as it goes."""
    predictions: list[Prediction | None] = [None] * len(rows)
    done = 0
    for chosen, request, on, layouts in Batch(rows).groups:
        costs = price(request, replace(on, factors=factors), layouts)
        n = len(chosen)
        memory = rows[chosen[0]].memory
        steps = np.array([np.broadcast_to(priced.step, n) for priced in costs])
        peaks = np.array([np.broadcast_to(priced.counted(memory), n) for priced in costs])
        over = np.array([np.broadcast_to(_least(priced) - priced.limit, n) for priced in costs])
        slowest = steps.argmax(axis=0)
        terms = [{name: np.broadcast_to(value, n) for name, value in priced.seconds.items()} for priced in costs]
        for at, index in enumerate(chosen):
            parts = {name: float(value[at]) for name, value in terms[slowest[at]].items()}
            seconds = float(steps[:, at].max())
            peak = float(peaks[:, at].max())
            predictions[index] = Prediction(seconds, peak, float(over[:, at].max()), parts)
        done += n
        if progress:
            progress(done, len(rows))
    return [prediction for prediction in predictions if prediction is not None]


def _least(priced: Priced) -> Number:
    """Bytes without which a run cannot go on: before it fails, the allocator returns what it keeps unused."""
    return priced.peak - RETURNED * priced.memory_bytes["slack"] + SPLIT * priced.memory_bytes["transient"]


def check_units(table: MeasuredTable) -> None:
    """Raises UserError when the file's times or peaks are a thousand times what the machines can do."""
    rows = table.measurements
    predicted = predict(table.measurements)
    unit = "milliseconds" if table.form == "csv" else "seconds"
    for name, unit_, values, measured in (
        ("step times", unit, [prediction.seconds for prediction in predicted], [row.step_seconds for row in rows]),
        ("peaks of memory", "GiB", [prediction.peak for prediction in predicted], [row.peak_bytes for row in rows]),
    ):
        pairs = [(p, m) for p, m in zip(values, measured, strict=True) if m is not None]
        if pairs:
            ours, theirs = np.array(pairs).T
            refuse_other_units(ours, theirs, f"{name} in {table.path}", unit_)


def score(
    rows: Sequence[MeasuredRow], calibration: Calibration, predictions: Sequence[Prediction] | None = None
) -> Scores:
    """The predictions of `calibration` against what `rows` measured; `predictions` saves making them again."""
    runs = [row.measurement for row in rows]
    predicted = predict(runs, calibration.factors) if predictions is None else predictions
    ran = [at for at, run in enumerate(runs) if not run.out_of_memory]
    taken = {at: seconds for at in ran if (seconds := runs[at].step_seconds) is not None}
    peaks = {at: peak for at in ran if (peak := runs[at].peak_bytes) is not None}
    # A measured time says that memory sufficed.
    ended = {at: bool(run.out_of_memory) for at, run in enumerate(runs) if run.out_of_memory is not None or at in taken}
    return Scores(
        rows=len(rows),
        timed=len(taken),
        **_times([predicted[at].seconds for at in taken], list(taken.values())),
        covered=_covered([(taken[at] / predicted[at].seconds, band(rows[at], calibration)) for at in taken]),
        **_regrets(rows, predicted, taken),
        memory_rows=len(peaks),
        memory_mape=_mape([predicted[at].peak for at in peaks], list(peaks.values())),
        labelled=len(ended),
        false_fits=sum(predicted[at].fits and out for at, out in ended.items()),
        false_misfits=sum(not predicted[at].fits and not out for at, out in ended.items()),
        chosen_out_of_memory=_chosen_out_of_memory(rows, predicted),
    )


def _mape(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    return float(np.mean(np.abs(np.divide(predicted, measured) - 1))) if predicted else None


def _covered(pairs: Sequence[tuple[float, tuple[float, float]]]) -> float | None:
    """The share of measured over predicted times that lie in their bands."""
    return float(np.mean([low <= ratio <= high for ratio, (low, high) in pairs])) if pairs else None


def _times(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, Any]:
    from scipy.stats import spearmanr

    if not predicted:
        return {}
    ranked = len(set(predicted)) > 1 and len(set(measured)) > 1
    return {
        "mape": _mape(predicted, measured),
        "bias": float(np.median(np.divide(predicted, measured))) - 1,
        "spearman": float(spearmanr(predicted, measured)[0]) if ranked else None,
    }


# --- choices -----------------------------------------------------------------------------------------------------


def _groups(rows: Sequence[MeasuredRow]) -> list[list[int]]:
    """Indices of rows whose times can be compared."""
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    return list(groups.values())


def _regrets(
    rows: Sequence[MeasuredRow], predictions: Sequence[Prediction], taken: Mapping[int, float]
) -> dict[str, Any]:
    all_ = []
    larger = []
    for group in _groups(rows):
        timed = [index for index in group if index in taken]
        if len(timed) < 2:
            continue
        chosen = min(timed, key=lambda index: predictions[index].seconds)
        all_.append(taken[chosen] / min(taken[index] for index in timed) - 1)
        if len(timed) >= SMALLEST_GROUP:
            larger.append(all_[-1])
    regrets: dict[str, Any] = {"groups": len(all_), "groups_of_three": len(larger)}
    if all_:
        regrets |= {"mean_regret": float(np.mean(all_)), "largest_regret": max(all_)}
    if larger:
        regrets |= {"regret_of_three": float(np.mean(larger)), "regret_interval": interval(larger)}
    return regrets


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean; the same for the same values."""
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.array(values)[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def _chosen_out_of_memory(rows: Sequence[MeasuredRow], predictions: Sequence[Prediction]) -> int:
    """Groups in which the fastest plan predicted to fit ran out of memory."""
    fitting = ([at for at in group if predictions[at].fits] for group in _groups(rows) if len(group) > 1)
    chosen = (min(group, key=lambda at: predictions[at].seconds) for group in fitting if group)
    return sum(bool(rows[at].measurement.out_of_memory) for at in chosen)


# --- writing -----------------------------------------------------------------------------------------------------


def with_predictions(table: MeasuredTable, predictions: Sequence[Prediction], calibration: Calibration) -> str:
    """The file's rows with their predictions added, in the file's own form. Older predictions are replaced."""
    pairs = list(zip(table.rows, predictions, strict=True))
    if table.form == "jsonl":
        lines = [
            msgspec.json.encode({**row.given, "predicted": _words(prediction, band(row, calibration), row.unpriced)})
            for row, prediction in pairs
        ]
        return b"\n".join((*lines, b"")).decode()
    columns = [*(name for name in table.columns if name != PREDICTED), PREDICTED]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row, prediction in pairs:
        writer.writerow({**row.given, PREDICTED: f"{prediction.seconds * 1000:.6g}"})
    return text.getvalue()


def band(row: MeasuredRow, calibration: Calibration) -> tuple[float, float]:
    """Factors below and above a row's predicted time within which its measured one should lie."""
    run = row.measurement
    return calibration.on(run.cluster, int(run.layout.world), run.stack).band


def _words(prediction: Prediction, around: tuple[float, float], unpriced: Sequence[str]) -> dict[str, Any]:
    low, high = around
    return {
        **({"unpriced": unpriced} if unpriced else {}),
        "step_seconds": prediction.seconds,
        "low": prediction.seconds * low,
        "high": prediction.seconds * high,
        "peak_gib": prediction.peak / 2**30,
        "fits": prediction.fits,
        "terms": prediction.terms,
    }
