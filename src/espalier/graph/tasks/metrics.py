"""Figures of merit: accuracy, F1, ROC-AUC, of values MSE, MAE and R², and of ranked links MRR and hits@k.

Sums with weights, so that ranks can add up; each figure is then a quotient of sums. F1 is made of counts by class, R²
of moments by column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.parallel.workload import Averages

Sums = dict[str, tuple[float, float]]

HITS = (1, 10, 50)
"""The k of hits@k (OGB, arXiv 2005.00687, uses 10, 20, 50 and 100 by data set)."""


def classified(logits: Tensor, labels: Tensor) -> Sums:
    """Of `logits` [items, classes] for `labels` int64 [items] (-1: not counted)."""
    known = labels >= 0
    logits = logits[known]
    labels = labels[known]
    count = float(len(labels))
    classes = logits.shape[1]
    guess = logits.argmax(1)
    right = guess == labels
    figures = {
        "loss": (float(F.cross_entropy(logits, labels, reduction="sum")), count),
        "accuracy": (float(right.sum()), count),
    }
    hit, guessed, true = (
        torch.bincount(class_ids, minlength=classes).tolist() for class_ids in (labels[right], guess, labels)
    )
    for at in range(classes):
        figures[f"count/hit/{at}"] = (float(hit[at]), count)
        figures[f"count/any/{at}"] = (float(guessed[at] + true[at]), count)
    return figures


def marked(logits: Tensor, labels: Tensor) -> Sums:
    """Of `logits` [items, tasks] for `labels` [items, tasks] of 0, 1 and NaN (not counted)."""
    known = ~labels.isnan()
    count = float(known.sum())
    losses = F.binary_cross_entropy_with_logits(logits[known], labels[known].to(logits.dtype), reduction="sum")
    right = ((logits[known] > 0) == (labels[known] > 0.5)).sum()
    return {"loss": (float(losses), count), "accuracy": (float(right), count)}


def regressed(rows: Tensor, labels: Tensor, deviations: Sequence[float]) -> Sums:
    """Of standardised `rows` [items, columns] for `labels` [items, columns] (NaN: not counted): the loss as it is, mean
    squared and absolute errors by column in the units of the targets, and the moments that R² is made of."""
    rows = rows.double()
    known = ~labels.isnan()
    errors = torch.where(known, rows - labels, 0.0)
    truths = torch.where(known, labels, 0.0).double()
    counts = known.sum(0).double().tolist()
    sums = {"loss": (float(errors.square().sum()), sum(counts))}
    moments = torch.stack([errors.square().sum(0), errors.abs().sum(0), truths.sum(0), truths.square().sum(0)])
    for at, (squared, absolute, first, second) in enumerate(moments.T.tolist()):
        count = counts[at]
        deviation = deviations[at]
        column = f".{at}" if len(counts) > 1 else ""
        sums[f"mse{column}"] = (deviation * deviation * squared, count)
        sums[f"mae{column}"] = (deviation * absolute, count)
        sums[f"count/error{column}"] = (squared, count)
        sums[f"count/first{column}"] = (first, count)
        sums[f"count/second{column}"] = (second, count)
    return sums


def areas(logits: Tensor, labels: Tensor) -> float:
    """ROC-AUC: of the second class of two, or the mean over tasks that have both answers; NaN when none has."""
    if labels.ndim == 1:
        return area((logits[:, 1] - logits[:, 0])[labels >= 0], labels[labels >= 0])
    task_areas = []
    for task in range(labels.shape[1]):
        known = ~labels[:, task].isnan()
        task_areas.append(area(logits[known, task], labels[known, task]))
    good = [task_area for task_area in task_areas if not math.isnan(task_area)]
    return sum(good) / len(good) if good else float("nan")


def area(scores: Tensor, labels: Tensor) -> float:
    """ROC-AUC of `scores` for `labels` 0 or 1: the share of pairs in order, ties half (Mann and Whitney, 1947)."""
    positive = labels > 0.5
    ones = int(positive.sum())
    zeros = int((~positive).sum())
    if not ones or not zeros:
        return float("nan")
    _, where, counts = scores.double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    ranks = (last - (counts - 1) / 2)[where]
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def ranked(true: Tensor, others: Tensor) -> Sums:
    """Of the scores of true links [links], each against those of its own `others` [links, negatives].

    A tie counts as half a place lost (as in OGB's and PyKEEN's realistic rank).
    """
    count = float(len(true))
    above = (others > true[:, None]).sum(1) + 0.5 * (others == true[:, None]).sum(1)
    rank = above + 1
    sums = {
        "mrr": (float((1 / rank).sum()), count),
        "auc": (float((1 - above / max(1, others.shape[1])).sum()), count),
    }
    return {**sums, **{f"hits@{k}": (float((rank <= k).sum()), count) for k in HITS if k < others.shape[1]}}


def summary(totals: Averages) -> dict[str, float]:
    """Totals as people read them: counts by class become macro F1, moments by column R², and columns of values have a
    mean; NaN (nothing to count) is left out."""
    figures = {name: value for name, value in totals.items() if "count/" not in name}
    for prefix in ("", "test_"):
        made = {**_macro_f1(totals, prefix), **_by_column(totals, prefix)}
        figures |= {f"{prefix}{name}": value for name, value in made.items()}
    return {name: figures[name] for name in sorted(figures, key=_place) if not math.isnan(figures[name])}


def _place(name: str) -> tuple[bool, bool, int, str]:
    """Of a figure among others: those of the test part, and of single columns, come last."""
    column = name.partition(".")[2]
    return name.startswith("test_"), name != "loss", int(column) if column.isdecimal() else -1, name


def _macro_f1(totals: Averages, prefix: str) -> dict[str, float]:
    start = f"{prefix}count/hit/"
    either = [(hit, totals[name.replace("/hit/", "/any/")]) for name, hit in totals.items() if name.startswith(start)]
    scores = [2 * hit / both for hit, both in either if both > 0]
    return {"f1": sum(scores) / len(scores)} if scores else {}


_CONSTANT = 1e-12
"""Of the mean square: a variance below it is rounding, and R² has no meaning."""


def _by_column(totals: Averages, prefix: str) -> dict[str, float]:
    """R² of each column of values, NaN of a constant one, and the means over several columns."""
    start = f"{prefix}count/error"
    columns = [name.removeprefix(start) for name in totals if name.startswith(start)]
    figures = {}
    for column in columns:
        error, first, second = (totals[f"{prefix}count/{name}{column}"] for name in ("error", "first", "second"))
        variance = second - first * first
        figures[f"r2{column}"] = 1 - error / variance if variance > _CONSTANT * second else math.nan
    for name in ("mse", "mae", "r2") if len(columns) > 1 else ():
        each = [figures.get(f"{name}{column}", totals.get(f"{prefix}{name}{column}", math.nan)) for column in columns]
        finite = [value for value in each if not math.isnan(value)]
        if finite:
            figures[name] = sum(finite) / len(finite)
    return figures
