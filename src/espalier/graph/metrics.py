"""Figures of merit: accuracy, F1, ROC-AUC, and of ranked links MRR and hits@k.

Sums with weights, so that ranks can add up; each figure is then a quotient of sums. F1 is made of counts by class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Sums = dict[str, tuple[float, float]]

HITS = (1, 10, 50)
"""The k of hits@k (OGB, arXiv 2005.00687, uses 10, 20, 50 and 100 by data set)."""


def classified(logits: Tensor, labels: Tensor) -> Sums:
    """Of `logits` [items, classes] for `labels` int64 [items] (-1: not counted)."""
    known = labels >= 0
    logits, labels = logits[known], labels[known]
    count, classes = float(len(labels)), logits.shape[1]
    guess = logits.argmax(1)
    right = guess == labels
    found: Sums = {
        "loss": (float(F.cross_entropy(logits, labels, reduction="sum")), count),
        "accuracy": (float(right.sum()), count),
    }
    hit, said, true = (torch.bincount(one, minlength=classes).tolist() for one in (labels[right], guess, labels))
    for at in range(classes):
        found[f"count/hit/{at}"] = (float(hit[at]), count)
        found[f"count/any/{at}"] = (float(said[at] + true[at]), count)
    return found


def marked(logits: Tensor, labels: Tensor) -> Sums:
    """Of `logits` [items, tasks] for `labels` [items, tasks] of 0, 1 and NaN (not counted)."""
    known = ~labels.isnan()
    count = float(known.sum())
    losses = F.binary_cross_entropy_with_logits(logits[known], labels[known].to(logits.dtype), reduction="sum")
    right = ((logits[known] > 0) == (labels[known] > 0.5)).sum()
    return {"loss": (float(losses), count), "accuracy": (float(right), count)}


def areas(logits: Tensor, labels: Tensor) -> float:
    """ROC-AUC: of the second class of two, or the mean over tasks that have both answers; NaN when none has."""
    if labels.ndim == 1:
        return area((logits[:, 1] - logits[:, 0])[labels >= 0], labels[labels >= 0])
    found = []
    for task in range(labels.shape[1]):
        known = ~labels[:, task].isnan()
        found.append(area(logits[known, task], labels[known, task]))
    good = [one for one in found if not math.isnan(one)]
    return sum(good) / len(good) if good else float("nan")


def area(scores: Tensor, labels: Tensor) -> float:
    """ROC-AUC of `scores` for `labels` 0 or 1: the share of pairs in order, ties half (Mann and Whitney, 1947)."""
    positive = labels > 0.5
    ones, zeros = int(positive.sum()), int((~positive).sum())
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


def summary(totals: Mapping[str, float]) -> dict[str, float]:
    """Totals as people read them: counts by class become macro F1; NaN (nothing to count) is left out."""
    found: dict[str, Any] = {}
    for name, value in totals.items():
        if "count/" not in name:
            found[name] = value
    for prefix in ("", "test_"):
        scores = []
        for name, hit in totals.items():
            if name.startswith(f"{prefix}count/hit/"):
                either = totals[name.replace("/hit/", "/any/")]
                scores += [2 * hit / either] if either > 0 else []
        if scores:
            found[f"{prefix}f1"] = sum(scores) / len(scores)
    order = sorted(found, key=lambda name: (name.startswith("test_"), name != "loss", name))
    return {name: found[name] for name in order if not math.isnan(found[name])}
