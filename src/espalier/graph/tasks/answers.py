"""Answers: the rows that a network gives for nodes or graphs as a loss, as figures of merit and as words. One form for
each kind of targets: classes, tasks, and values, whose rows are standardised (`targets.Scale`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.graph.data.graph import Array, DataSplit, Graph
from espalier.graph.tasks import metrics
from espalier.kernels.cross_entropy import cross_entropy
from espalier.parallel.workload import Averages, Shard, SummedLoss
from espalier.store.artifacts import Artifact, Table

Answers = list[dict[str, Any]]
"""What a network says, a table for each node, pair or graph."""


class LabelledTask(Protocol):
    """What is asked of a task whose items have labels."""

    parts: DataSplit
    graph: Graph
    labels: Tensor


def trained_labels(graph: Graph) -> Tensor:
    """The labels as losses take them: values standardised, float64."""
    labels = np.asarray(graph.labels)
    if graph.values:
        assert graph.scale is not None
        labels = graph.scale.standardised(labels)
    return torch.from_numpy(labels)


# --- losses ------------------------------------------------------------------------------------------------------


def loss_of(graph: Graph, logits: Tensor, labels: Tensor, chosen: Tensor | None = None) -> SummedLoss:
    """(sum, weight) over the answers that are known, of the rows `chosen` (None: all)."""
    return (squared_errors if graph.values else summed_loss)(logits, labels, chosen)


def summed_loss(logits: Tensor, labels: Tensor, chosen: Tensor | None = None) -> SummedLoss:
    """Cross entropies of classes or tasks, as `loss_of`."""
    if labels.ndim == 2:
        logits = logits if chosen is None else logits[chosen]
        known = ~labels.isnan()
        answers = labels[known].to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits[known], answers, reduction="sum"), known.sum()
    return cross_entropy(logits, labels, chosen), _known(labels)


def squared_errors(rows: Tensor, labels: Tensor, chosen: Tensor | None = None) -> SummedLoss:
    """Squared errors of standardised values, in at least float32, as `loss_of`."""
    rows = rows if chosen is None else rows[chosen]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    known = ~labels.isnan()
    errors = torch.where(known, rows.to(dtype) - labels.to(dtype), 0.0)
    return errors.square().sum(), known.sum()


def _known(labels: Tensor) -> Tensor:
    if labels.device.type != "cpu":
        return (labels >= 0).sum()
    return torch.tensor(np.count_nonzero(labels.numpy() >= 0))  # by NumPy: torch's threads would spin afterwards


# --- figures -----------------------------------------------------------------------------------------------------


def held_out_figures(task: LabelledTask, shard: Shard, logits_of: Callable[[Array], Tensor]) -> metrics.Sums:
    """Figures of the shard's validation items, and of as large a share of the test items under `test_`."""
    figures: metrics.Sums = {}
    kind = task.graph.kind
    for prefix, ids, shard_ids in task.parts.held_out(shard):
        sums = _figures(task.graph, logits_of(shard_ids), task.labels[shard_ids])
        figures |= {prefix + name: value for name, value in sums.items()}
        if kind == "tasks" or (kind == "classes" and task.graph.outputs == 2):
            first = shard.start == 0  # no sum over items: the first shard sees to all of it
            value = metrics.areas(logits_of(ids), task.labels[ids]) if first else 0.0
            figures[f"{prefix}auc"] = (value, float(first))
    return figures


def _figures(graph: Graph, logits: Tensor, labels: Tensor) -> metrics.Sums:
    if graph.values:
        assert graph.scale is not None
        return metrics.regressed(logits, labels, graph.scale.deviation.tolist())
    return (metrics.classified if labels.ndim == 1 else metrics.marked)(logits, labels)


def score_name(graph: Graph) -> str:
    """The figure that stands for the others."""
    return "R²" if graph.values else "accuracy"


def score(means: Averages) -> float:
    """That figure in per cent; minus the loss where nothing is known of it."""
    return next((100 * means[name] for name in ("accuracy", "r2") if name in means), -means["loss"])


# --- words -------------------------------------------------------------------------------------------------------


def told(logits: Tensor, graph: Graph, names: Sequence[str]) -> Answers:
    """Rows of logits as answers: the class and its probability, the probability of each task, or the values in the
    units of the targets."""
    if graph.values:
        assert graph.scale is not None
        rows = graph.scale.restored(logits.detach().double().cpu().numpy()).tolist()
        return [{"name": name, **_valued(row)} for name, row in zip(names, rows, strict=True)]
    if graph.kind == "tasks":
        chances = logits.sigmoid().tolist()
        return [{"name": name, "probabilities": row} for name, row in zip(names, chances, strict=True)]
    best = logits.softmax(1).max(1)
    answers = []
    for name, chance, at in zip(names, best.values.tolist(), best.indices.tolist(), strict=True):
        label = graph.classes[at] if at < len(graph.classes) else str(at)
        answers.append({"name": name, "label": label, "probability": chance})
    return answers


def _valued(row: Sequence[float]) -> dict[str, Any]:
    return {"value": row[0]} if len(row) == 1 else {"values": list(row)}


def lines(answers: Sequence[Mapping[str, Any]] | Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """Answers as lines of text, cells apart by tabs."""
    for answer in answers:
        label = [answer["label"]] if "label" in answer else []
        yield "\t".join([answer["name"], *label, _numbers(answer)]) + "\n"


def _numbers(answer: Mapping[str, Any]) -> str:
    for name, form in (
        ("value", "{:.6g}"),
        ("values", "{:.6g}"),
        ("probability", "{:.4f}"),
        ("probabilities", "{:.4f}"),
    ):
        if name in answer:
            given = answer[name] if isinstance(answer[name], list) else [answer[name]]
            return " ".join(map(form.format, given))
    raise AssertionError(f"an answer without numbers: {list(answer)}")


def truth_table(graph: Graph, items: Sequence[int], answers: Sequence[Mapping[str, Any]]) -> list[Artifact]:
    """Answers beside the truth; none of tasks."""
    if graph.labels is None or graph.kind == "tasks" or not answers:
        return []
    what = "node" if graph.starts is None else "graph"
    if graph.values:
        truths = ["" if np.isnan(row).all() else _numbers(_valued(row.tolist())) for row in graph.labels[items]]
        rows = [[answer["name"], _numbers(answer), truth] for answer, truth in zip(answers, truths, strict=True)]
        return [Table((what, "answer", "truth"), rows)]
    names = [graph.classes[at] if at < len(graph.classes) else str(at) for at in graph.labels[items].tolist()]
    pairs = zip(answers, names, strict=True)
    rows = [[answer["name"], answer["label"], answer["probability"], name] for answer, name in pairs]
    return [Table((what, "answer", "probability", "truth"), rows)]
