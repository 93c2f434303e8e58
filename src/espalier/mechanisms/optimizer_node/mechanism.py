"""LuWu as a mechanism: parameters and optimizer states on nodes of their own, a window of layers on each worker.

After LuWu (arXiv 2409.00918; later DisDP). A worker pulls each layer's parameters when forward and backward need them
and pushes its gradient as soon as it is complete; the node adds the gradients of all workers and moves the parameters.
Workers hold no state: a run goes on from the step of the node's files, which are its checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from espalier.checkpoint.base import StateDict
from espalier.mechanisms.optimizer_node.state import OptimizerNodeState
from espalier.optim.schedules import factor
from espalier.parallel.layer_client import StepLost
from espalier.plan.compose import Claim
from espalier.recipe import Adamw
from espalier.recipe.errors import UserError
from espalier.train.layer_window import Connect, make_window
from espalier.train.mechanism import Build, Mechanism
from espalier.train.window_sharding import WindowOptimizer, WindowSharding

if TYPE_CHECKING:
    from espalier.checkpoint.base import StatefulParts
    from espalier.mechanisms.optimizer_node.client import Client
    from espalier.mechanisms.optimizer_node.local_steps import LocalSteps
    from espalier.optim.base import Optimizer
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

CLAIM = Claim(
    "luwu",
    question="shard",
    needs={"a model", "ranks of other roles"},
    changes={"gradients are summed", "a window of layers", "states on nodes"},
    forbids={
        "the model is cut",
        "experts are spread",
        "layers of one stage",
        "recomputes activations",
        "compiles blocks",
        "the loss is scaled",
    },
    after={"attend", "aggregate", "route", "precision", "matrices"},
)
"""Workers compute activations again by themselves. Where they take steps of their own, their parameters are on their
own disks (`local_steps`)."""
OPTIMIZER = Claim("adamw_on_node", question="optimizer", needs={"states on nodes"}, instead=("adamw",))


class NodeSharding(WindowSharding):
    """See `WindowSharding`: the layers are on nodes, whose files are the checkpoint."""

    def parts(self, optimizer: Optimizer) -> StatefulParts:
        """See `Sharding.parts`: where the state is."""
        return {"nodes": NodeState(self)}


class LocalSharding(NodeSharding):
    """See `NodeSharding`: in a round, this worker's own parameters are on its disk."""

    @property
    def local(self) -> LocalSteps:
        """This worker's own model."""
        return cast("LocalSteps", self.client)

    @property
    def steps(self) -> int:
        return self.local.run

    def end_round(self, run: int, rate: float, stop: bool) -> bool:
        self.window.drop()
        stopping = self.local.end_round(run, rate, stop)
        self.window.prefetch(self.window.usual)
        return stopping


class NodeState:
    """What a checkpoint says of a model that nodes hold: their step and their layers. Stateful."""

    def __init__(self, sharding: NodeSharding) -> None:
        self.sharding = sharding

    def state_dict(self) -> StateDict:
        """The step, and the shape of each parameter by its name."""
        self.sharding.settle()
        layers = [each.layer for each in self.sharding.window.layers]
        tensors = {name: list(shape) for layer in layers for name, shape in layer.tensors}
        return {"step": self.sharding.steps, "tensors": tensors}

    def load_state_dict(self, state: StateDict) -> None:
        """Raises UserError where the nodes' files are of another model, or of an earlier step than one that was damaged
        explains."""
        nodes = self.state_dict()
        if state["tensors"] != nodes["tensors"]:
            raise UserError(
                "The optimizer node holds another model than the checkpoint names.",
                do="give the node the folder of this run, or start a new run with --run FOLDER",
            )
        if state["step"] > nodes["step"] + 1:
            raise UserError(
                f"The optimizer node's files are of step {nodes['step']}, and the checkpoint is of step "
                f"{state['step']}.",
                why="the node's files are the state of the run",
                do="put back the node's folder, or start a new run with --run FOLDER",
            )


def sharding_of(context: Build) -> NodeSharding:
    """Of a model on nodes."""
    assert isinstance(context.sharding, NodeSharding)
    return context.sharding


class ModelOnNodes(Mechanism):
    """Parameters, gradients and optimizer states live on ranks with the role `optimizer`."""

    claim = CLAIM
    record = "luwu"

    def __init__(self, connect: Connect) -> None:
        self.connect = connect

    def wrap(self, context: Build) -> None:
        """Makes the window. Raises UserError for a model that cannot be held by layers."""
        assert context.model is not None
        context.window = window = make_window(
            context, self.connect, context.plan.state(OptimizerNodeState).layer_window
        )
        context.stalled = lambda: window.stalled
        context.meters["node"] = lambda: {**window.read(), **window.client.read()}
        if context.plan.replicas:
            context.sharding = LocalSharding(context.model, window)
            return
        train = context.recipe.train
        context.sharding = NodeSharding(
            context.model, window, lambda step: factor(train.schedule, step, train.steps or 0)
        )

    def resumed(self, context: Build) -> int | None:
        """The step of the nodes' files."""
        return sharding_of(context).steps or None

    def recovered(self, context: Build, error: Exception) -> int | None:
        """Where a node has started again, or its standby goes on."""
        if not isinstance(error, StepLost) or context.plan.replicas:
            return None
        return sharding_of(context).window.recover() if error.again is None else error.again

    def close(self, context: Build) -> None:
        """The nodes wait for this worker no more."""
        sharding = sharding_of(context)
        sharding.settle()
        sharding.client.close()

    def abandon(self, context: Build) -> None:
        """The nodes wait for this worker, or another in its place: no step counts without its part."""
        cast("Client | LocalSteps", sharding_of(context).client).close(leave=False)


class OptimizerOnNodes(Mechanism):
    """AdamW, run by the nodes."""

    claim = OPTIMIZER

    def wrap(self, context: Build) -> None:
        """Makes what tells them."""
        context.optimizer = WindowOptimizer(sharding_of(context))


def on_nodes(plan: Plan) -> bool:
    """Whether ranks of the plan hold the model for the others."""
    return bool(plan.optimizer_nodes)


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """The window, where the plan has optimizer nodes."""
    if not on_nodes(plan):
        return None
    from espalier.mechanisms.optimizer_node.role import connect  # sockets and files, which other runs do without

    return ModelOnNodes(connect)


def choose_optimizer(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """AdamW, where the plan has optimizer nodes."""
    return OptimizerOnNodes() if on_nodes(plan) and isinstance(recipe.train.optimizer, Adamw) else None
