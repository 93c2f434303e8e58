"""Elastic computation reformation: entries that few tokens of a window read are left out, down to a bound of recall.

TorchGT (arXiv 2407.14106, section 3.3) replaces sparse regions of the clustered adjacency by dense sub-blocks, whose
positions are not those of the edges. Here windows of 16 rows keep the columns that most of their rows read, which are
computed densely, and what is left out is counted: recall = edges that are kept / edges. Nothing is added. Self-loops,
paths, expanders and virtual tokens all stay. How much is left out follows the speed of the loss, by the rule of the
authors' tuner (`graph.tasks.loss_speed`), between no edge and the bound, and is in the log, from which steps
that are made again take it; answers are always given along all edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from espalier.checkpoint.base import StateDict
from espalier.graph.tasks.loss_speed import LossTuner
from espalier.mechanisms.pattern_attention.pattern import ROWS, Pattern, offsets
from espalier.parallel.workload import SummedLoss
from espalier.plan.compose import Claim
from espalier.recipe import GraphTransformer
from espalier.sparse import CSR
from espalier.track.decision_log import Decisions
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from torch import nn

    from espalier.checkpoint.base import StatefulParts
    from espalier.graph.run import GraphRun, Task
    from espalier.graph.sampling.subgraphs import SubgraphBatch
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

CLAIM = Claim(
    "reformation",
    question="attention pattern",
    needs={"a model"},
    changes={"edges are left out"},
    after={"tokens"},
    option="model.recall",
)
LEVELS, FIRST = 5, 1
"""Of recall, from all edges to the bound, and the one that training begins with."""


class Reformed(NamedTuple):
    """A pattern with fewer entries.

    Attributes:
        entries: int64, which entries of the whole pattern they are.
        recall: the share of the graph's edges that are kept.
    """

    pattern: Pattern
    entries: Tensor
    recall: float


def reformed(whole: Pattern, recall: float) -> Reformed:
    """`whole` without edges of the columns that the fewest rows of a window read, but with at least `recall` of all.

    Edges of a column stay or go in order of their numbers; as many go as may.
    """
    matrix = whole.matrix
    kinds = whole.kinds
    assert matrix is not None, "a full pattern has no edges to leave out"
    rows = matrix.rows.numpy()
    columns = matrix.indices.numpy()
    real = np.ones(len(rows), bool) if kinds is None else kinds.numpy() == 1
    keys = rows // ROWS * np.int64(whole.tokens) + columns
    _, column, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    candidates = np.flatnonzero(real)
    least = int(np.ceil(recall * len(candidates) - 1e-9))
    gone = candidates[np.argsort(sizes[column[candidates]], kind="stable")][: len(candidates) - least]
    keep = np.ones(len(rows), bool)
    keep[gone] = False
    entries = torch.from_numpy(np.flatnonzero(keep))
    made = CSR(offsets(rows[keep], whole.tokens), matrix.indices[entries], matrix.shape)
    share = 1.0 if not len(candidates) else 1 - len(gone) / len(candidates)
    return Reformed(Pattern(made, whole.tokens, None if kinds is None else kinds[entries]), entries, share)


LEVEL_RULE, SIGNAL = "model.recall.level", "speed of the loss"
"""In plans and logs: 0, all edges, to `LEVELS - 1`, the bound."""


class RecallTuner(LossTuner):
    """Which recall a step has, from 1 to `bound`: a `track.decision_log.Controller`. Has state.

    Training begins one level below 1, as the authors' does. Where the loss changes ever faster edges are left out,
    where ever more slowly they come back.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.levels = np.linspace(1, bound, LEVELS).tolist()
        self.level = FIRST

    @property
    def recall(self) -> float:
        """Of the step under way."""
        return float(self.levels[self.level])

    @property
    def values(self) -> dict[str, int]:
        return {LEVEL_RULE: self.level}

    def turned(self, recorded: Mapping[str, int]) -> RecallTuner:
        """The next step begins."""
        level = self.level + self.coming
        self.coming = 0
        self.level = min(LEVELS - 1, max(0, recorded.get(LEVEL_RULE, level)))
        return self

    def state_dict(self) -> StateDict:
        return {"level": self.level, **super().state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self.level = state.get("level", self.level)
        super().load_state_dict(state)


class Reformation(Mechanism):
    """Training steps leave edges out as the tuner says. Has state: the tuner, and what the step's loss was."""

    claim = CLAIM
    record = "torchgt"

    def __init__(self, bound: float) -> None:
        self.tuner = RecallTuner(bound)
        self.decisions = Decisions(self.tuner, SIGNAL)
        self._full = False

    def wrap(self, context: Build) -> None:
        """Tells the workload of the tuner, and the tuner of the losses."""
        run = cast("GraphRun", context.workload)
        run.step_loss = partial(self.loss, run.task)
        context.meters["recall"] = lambda: 1.0 if self._full else self.tuner.recall
        context.follow_loss.append(self.decisions.heard)
        context.decisions.append(self.decisions)

    def loss(self, task: Task, model: nn.Module, batch: SubgraphBatch) -> SummedLoss:
        """Of `task`, along the edges that the step keeps: here, as batches are made while the step before is under
        way."""
        self.decisions.turn(batch.step)
        fewer = batch.blocks[0]._replace(recall=self.tuner.recall)
        self._full = fewer.full
        return task.loss(model, batch._replace(blocks=(fewer, *batch.blocks[1:])))

    def state(self, context: Build, parts: StatefulParts) -> StatefulParts:
        """With what the tuner decides from."""
        return {**parts, "recall rule": self.tuner}


def bound(recipe: Recipe) -> float | None:
    """The least recall; None: the recipe lets no edge go."""
    options = recipe.model
    return options.recall if isinstance(options, GraphTransformer) and options.recall < 1 else None


def sentence(recipe: Recipe) -> str:
    """What a plan says; empty where no edge goes."""
    if (least := bound(recipe)) is None:
        return ""
    return (
        f"Attention: training steps leave edges out; recall begins at {RecallTuner(least).recall:.4g} and follows how "
        f"fast the loss changes, from 1 to {least:g} (model.recall); see the log."
    )


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the recipe lets edges go."""
    least = bound(recipe)
    return None if least is None else Reformation(least)
