"""A mechanism: one answer to one question of a plan, as `compose` orders it and `train.build` applies it.

Mechanisms meet in a `Build`, never in one another: each takes from it what earlier ones have left there, and leaves
there what it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from espalier.plan.compose import Claim

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from espalier.checkpoint.base import StatefulParts
    from espalier.optim.base import MakeGroup, Optimizer
    from espalier.optim.loss_scale import LossScale
    from espalier.parallel.agreement import Agreement
    from espalier.parallel.mesh import ProcessMesh
    from espalier.parallel.model_cut import ModelCut
    from espalier.parallel.model_stages import ModelStages
    from espalier.parallel.schedule import Schedule, TensorStore, Window
    from espalier.parallel.sharding import Sharding
    from espalier.parallel.workload import Workload
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe
    from espalier.store.base import WeightStore
    from espalier.track.decision_log import Decisions


@dataclass
class Build:
    """A run on one rank while it is put together. Has state: every mechanism of the plan changes it in turn.

    Attributes:
        recipe, plan, workload: what is to run.
        mesh: the ranks.
        device: where this rank computes.
        model: None until the model is built; changed in place by later mechanisms.
        forward: makes the context that every forward pass runs in.
        loss_scale: what multiplies the loss, where gradients would else be too small for their precision; None: 1.
        matrices: names of the matrices that the optimizer moves as a whole.
        cut: how the model is cut over the ranks of a replica; None: each holds it whole.
        stages: the pipeline stages of this rank; None: it has all layers.
        window: the layers that are here at a time; None: all are.
        activations: where inputs of a window's layers wait for backward; None: on the device.
        weights: what keeps frozen weights of blocks in host memory; None: they are on the device.
        group: makes the parts of the optimizer, and keeps their states; None: in memory, beside the parameters.
        sharding, optimizer, schedule, agreement: what trains it; None until a mechanism has made it.
        folder: of the run; None: nothing is kept.
        meters: what every step says of itself besides, by name of the event's field.
        decisions: what follows signals while it runs.
        follow_loss: given the loss of each step that all ranks have agreed on, before the step counts.
        damaged: what was damaged in files that outlive ranks, and what is done about it.
        stalled: seconds in all that forward and backward passes have waited for other ranks.
        reconnects: see `Pulse.reconnects`.
    """

    recipe: Recipe
    plan: Plan
    workload: Workload
    mesh: ProcessMesh
    device: torch.device
    model: nn.Module | None = None
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    loss_scale: LossScale | None = None
    matrices: frozenset[str] = frozenset()
    cut: ModelCut | None = None
    stages: ModelStages | None = None
    window: Window | None = None
    activations: TensorStore | None = None
    weights: WeightStore | None = None
    group: MakeGroup | None = None
    sharding: Sharding | None = None
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    agreement: Agreement | None = None
    folder: Path | None = None
    meters: dict[str, Callable[[], Any]] = field(default_factory=dict)
    decisions: list[Decisions] = field(default_factory=list)
    follow_loss: list[Callable[[Sequence[float]], None]] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    stalled: Callable[[], float] = float
    reconnects: Callable[[], object] = float


class Mechanism:
    """The Protocol of all mechanisms, with the plain answer for what one does not do.

    Attributes:
        claim: the question it answers, what it needs of others, what it brings and what it cannot stand.
        record: the name of its `Record`, where it is one of the systems.
    """

    claim: Claim
    record: ClassVar[str] = ""

    def wrap(self, context: Build) -> None:
        """Does its part in `context`. Called once, after all that it needs."""

    def state(self, context: Build, parts: StatefulParts) -> StatefulParts:
        """What a checkpoint holds, given the `parts` that earlier mechanisms have named."""
        return parts

    def resumed(self, context: Build) -> int | None:
        """Steps of a state that it has taken up by itself, which lives longer than ranks; None: it has none."""
        return None

    def recovered(self, context: Build, error: Exception) -> int | None:
        """The step to be made now, where `error` lost some that can be made again; None: it is of another kind."""
        return None

    def close(self, context: Build) -> None:
        """Leaves what other processes wait for. Called once, when this rank makes no more steps."""

    def abandon(self, context: Build) -> None:
        """In place of `close` where this rank ends by an error, and the others may wait for it."""
        self.close(context)


Choose = Callable[["Recipe", "Plan"], "Mechanism | None"]
"""A row of the table of mechanisms: the answer to its question that a recipe and its plan ask for, if they do."""
