"""What a trained graph network answers: the input names nodes, pairs of nodes or small graphs; without one, all."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from espalier.errors import UserError
from espalier.graph.link import LinkTask
from espalier.graph.many import GraphTask
from espalier.graph.workload import GraphWorkload


def answers(workload: GraphWorkload, model: nn.Module, text: str | None) -> list[dict[str, Any]]:
    """One answer for each thing that `text` names, by name or number.

    Nodes and graphs are separated by commas or line ends; a pair is `a,b`, and pairs by line ends or semicolons. None:
    every node or graph; all links that were held out.
    """
    task = workload.task
    if isinstance(task, LinkTask):
        return task.answers(model, _pairs(task, text))
    if text is None:
        return task.answers(model, range(workload.graph.items))
    words = [word.strip() for line in text.splitlines() for word in line.split(",")]
    found = [word for word in words if word]
    if not found:
        raise UserError("The input names nothing.", do="a node's name or number, such as 0")
    if isinstance(task, GraphTask):
        return task.answers(model, [_graph(task, word) for word in found])
    return task.answers(model, [workload.graph.find(word) for word in found])


def _graph(task: GraphTask, word: str) -> int:
    if not word.isdecimal() or int(word) >= task.graph.items:
        raise UserError(f"There is no graph {word!r}.", do=f"a number up to {task.graph.items - 1}")
    return int(word)


def _pairs(task: LinkTask, text: str | None) -> list[tuple[int, int]]:
    if text is None:
        ids = np.concatenate([task.parts.validation, task.parts.test])
        return [(int(head), int(tail)) for head, tail in task.links.pairs[:, ids].T]
    found = []
    for pair in filter(None, (part.strip() for line in text.splitlines() for part in line.split(";"))):
        ends = [word.strip() for word in pair.split(",")]
        if len(ends) != 2:
            raise UserError(f"{pair!r} is no pair of nodes.", do="two names or numbers with a comma, such as 0,1")
        found.append((task.graph.find(ends[0]), task.graph.find(ends[1])))
    if not found:
        raise UserError("The input names nothing.", do="two nodes, such as 0,1")
    return found
