"""Answers: the rows that a network gives for nodes or graphs as a loss, as figures of merit and as words. One form for
each kind of targets: classes, tasks, and values, whose rows are standardised (`targets.Scale`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from espalier.graph.data.graph import Array, Examples, Graph, scaled
from espalier.graph.tasks import metrics
from espalier.kernels.cross_entropy import cross_entropy
from espalier.parallel.workload import Averages, Shard, SummedLoss
from espalier.recipe.errors import UserError
from espalier.store.artifacts import Artifact, Table

Answers = list[dict[str, Any]]
"""What a network says, a table for each node, pair or graph."""
AnswerForm = Callable[[Tensor, Graph, Sequence[int]], Iterable[dict[str, Any]]]
"""Makes answers of rows of logits for items of a graph."""


AT_ONCE = 1 << 16
"""Items whose answers are made at once."""


class LabelledTask(Examples):
    """A task whose items, nodes or small graphs, have labels.

    Attributes:
        inference: of a model, what it gives for any items: int64 ids -> their logits, on the CPU.
    """

    inference: Callable[[nn.Module], Callable[[Array], Tensor]]

    def __init__(self, graph: Graph, item: str) -> None:
        assert graph.parts is not None
        super().__init__(graph.parts)
        if not self.items:
            raise UserError(f"{graph.origin} has no {item} to train on.", do="graph.split = [0.6, 0.2, 0.2]")
        self.graph = scaled(graph)
        self.labels = trained_labels(self.graph)
        self.outputs = graph.outputs

    def evaluate(self, model: nn.Module, shard: Shard) -> metrics.Sums:
        """Figures of the shard's validation items, and of as large a share of the test items under `test_`."""
        return held_out_figures(self, shard, self.inference(model))

    def name(self, item: int) -> str:
        """Of a node or a graph, for people."""
        return item_name(self.graph, item)

    def answers(self, model: nn.Module, items: Sequence[int]) -> Answers:
        """What the model says of these items."""
        return list(self.each(model, items))

    def each(self, model: nn.Module, items: Sequence[int], form: AnswerForm | None = None) -> Iterator[dict[str, Any]]:
        """As `answers`, item by item: of more than memory has room for answers of. `form`: of rows of logits."""
        logits_of = self.inference(model)
        for at in range(0, len(items), AT_ONCE):
            some = items[at : at + AT_ONCE]
            yield from (form or told)(logits_of(np.asarray(some, np.int64)), self.graph, some)


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


def item_name(graph: Graph, item: int) -> str:
    """Of a node, or of a small graph, for people."""
    return graph.called(item) if graph.starts is None else f"graph {item}"


def scored(logits: Tensor, graph: Graph) -> Array:
    """float64 [items, outputs] of rows of logits: the probability of each class or task, or the values in the units of
    the targets."""
    if graph.values:
        assert graph.scale is not None
        return graph.scale.restored(logits.detach().double().cpu().numpy())
    chances = logits.sigmoid() if graph.kind == "tasks" else logits.softmax(1)
    return chances.detach().double().cpu().numpy()


def told(logits: Tensor, graph: Graph, items: Sequence[int]) -> Answers:
    """Rows of logits as answers: the class and its probability, the probability of each task, or the values."""
    rows = scored(logits, graph)
    names = [item_name(graph, item) for item in items]
    if graph.kind != "classes":
        form = _valued if graph.values else lambda row: {"probabilities": row}
        return [{"name": name, **form(row)} for name, row in zip(names, rows.tolist(), strict=True)]
    best = zip(names, rows.argmax(1).tolist(), rows.max(1).tolist(), strict=True)
    return [{"name": name, "label": _class(graph, at), "probability": chance} for name, at, chance in best]


def table_rows(logits: Tensor, graph: Graph, items: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of logits as rows of a table: the node by its name or number, or the graph by its number, the likeliest
    class, and each of its numbers under the name of the class, or of the column of labels, that it is of."""
    rows = scored(logits, graph)
    word = "value" if graph.values else "probability"
    names = graph.classes if graph.kind == "classes" else graph.label_columns
    heads = [f"{word}.{name}" for name in names or range(rows.shape[1])]
    heads = heads if names or len(heads) > 1 else [word]
    for item, row in zip(items, rows, strict=True):
        key = {"node": graph.key(item)} if graph.starts is None else {"graph": item}
        label = {"label": _class(graph, int(row.argmax()))} if graph.kind == "classes" else {}
        yield {**key, **label, **dict(zip(heads, row.tolist(), strict=True))}


def _class(graph: Graph, at: int) -> str:
    return graph.classes[at] if at < len(graph.classes) else str(at)


def _valued(row: Sequence[float]) -> dict[str, Any]:
    return {"value": row[0]} if len(row) == 1 else {"values": list(row)}


def lines(answers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Answers as lines of text, cells apart by tabs."""
    for answer in answers:
        label = [answer["label"]] if "label" in answer else []
        yield "\t".join([answer["name"], *label, _numbers(answer)]) + "\n"


def _numbers(answer: Mapping[str, Any]) -> str:
    name = next(name for name in ("value", "values", "probability", "probabilities") if name in answer)
    form = "{:.6g}" if name.startswith("value") else "{:.4f}"
    return " ".join(map(form.format, np.atleast_1d(answer[name]).tolist()))


def truth_table(graph: Graph, items: Sequence[int], answers: Sequence[Mapping[str, Any]]) -> list[Artifact]:
    """Answers beside the truth; none of tasks."""
    if graph.labels is None or graph.kind == "tasks" or not answers:
        return []
    what = "node" if graph.starts is None else "graph"
    if graph.values:
        truths = ["" if np.isnan(row).all() else _numbers(_valued(row.tolist())) for row in graph.labels[items]]
        rows = [[answer["name"], _numbers(answer), truth] for answer, truth in zip(answers, truths, strict=True)]
        return [Table((what, "answer", "truth"), rows)]
    names = [_class(graph, at) for at in graph.labels[items].tolist()]
    pairs = zip(answers, names, strict=True)
    rows = [[answer["name"], answer["label"], answer["probability"], name] for answer, name in pairs]
    return [Table((what, "answer", "probability", "truth"), rows)]
