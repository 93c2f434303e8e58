"""LuWu as a mechanism: parameters and optimizer states on nodes of their own, a window of layers on each worker.

After LuWu (arXiv 2409.00918; later DisDP). A worker pulls each layer's parameters when forward and backward need them
and pushes its gradient as soon as it is complete; the node adds the gradients of all workers and moves the parameters.
Workers hold no state: a run goes on from the step of the node's files, which are its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from espalier.machine import malloc_trim
from espalier.mechanisms.optimizer_node.window import HOST, HeldLayer, LayerWindow, rank_memory, window_size
from espalier.optim.base import Owned
from espalier.optim.schedules import factor
from espalier.parallel.layer_client import LayerClient, LocalClient, StepLost, layers_of, no_layers
from espalier.plan.axes.node_layout import Layer
from espalier.plan.compose import Claim
from espalier.recipe import Adamw
from espalier.recipe.errors import UserError
from espalier.recipe.records import Record
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from espalier.checkpoint.base import Stateful
    from espalier.optim.base import Optimizer
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

RECORD = Record(
    name="luwu",
    title="LuWu: the optimizer and all model state on nodes of their own, out of core",
    aliases=("disdp", "optimizer node"),
    paper="arXiv 2409.00918 (later versions: DisDP, ISCA 2026)",
    question="Where does each tensor live?",
    files=("mechanisms/optimizer_node/", "mechanisms/pipeline/vertical.py"),
    chosen="model states larger than the memory of all ranks together, with a node that has disks, or links on which "
    "sharded data parallel waits",
    cost="per worker and layer of S bytes: S sent, 2*S received (S of the table, the head and the last two blocks), "
    "whatever the number of workers and micro-batches; the node reads and writes 12 bytes of state per parameter and "
    "step, reads 4 for each pull of each worker and writes 4 of gradients until the step is decided; a step takes "
    "max(compute, 2*S/bandwidth, the node's disks)",
    law="parameters after n steps equal those of an optimizer in memory to the bit; a run goes on from the node's "
    "files to the bit; several workers end with the same bits",
    law_test="tests/shard/luwu/test_run.py::test_one_worker_and_its_nodes_train_to_the_last_bit_as_plain_adamw",
    bench="bench/luwu.py",
    state="works",
    remark="on processors; models that come in pieces; a node fed at 200 Mbit/s reaches 0.87 of what link, disk and "
    "AdamW allow (goal 0.9; docs/benchmarks.md)",
    gpu="NVIDIA H100, November 2026",
)
CLAIM = Claim(
    "luwu",
    question="shard",
    needs={"a model", "ranks of other roles"},
    changes={"gradients are summed", "a window of layers", "states on nodes"},
    forbids={
        "the model is cut",
        "layers of one stage",
        "recomputes activations",
        "compiles blocks",
        "the loss is scaled",
    },
    after={"attend", "aggregate", "route", "precision", "matrices"},
)
"""Workers compute activations again by themselves. Where they take steps of their own, their parameters are on their
own disks (`local_steps`)."""
SKELETON = Claim("skeleton", question="model", changes={"a model"})
OPTIMIZER = Claim("adamw_on_node", question="optimizer", needs={"states on nodes"}, instead=("adamw",))


class NodeSharding:
    """See `Sharding`: nothing lives here but a window of layers. Has state: the step, and what the node told of it.

    Args:
        model: its trainable parameters are those of the window's layers.
        window: the layers, and the way to the nodes.
        rate: factor of the learning rate of each step, by which nodes step ahead of a decision; None: they do not.

    Attributes:
        owned: one number, whose gradient is what the summed gradient is to be multiplied with before it is used.
    """

    def __init__(self, model: nn.Module, window: LayerWindow, rate: Callable[[int], float] | None = None) -> None:
        self.model, self.window, self.rate = model, window, rate
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.owned: Sequence[Owned] = [Owned("factor of the gradient", self.factor, self.factor.shape)]
        self.together = False
        self._norm = 0.0

    @property
    def client(self) -> LayerClient:
        """The way to the nodes."""
        return self.window.client

    @property
    def steps(self) -> int:
        """Of the run, that the nodes hold."""
        return self.window.step

    def clear(self) -> None:
        """See `Sharding.clear`."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """See `Sharding.accumulate`: the schedule pushes."""
        return nullcontext()

    def alone(self) -> AbstractContextManager[None]:
        """See `Sharding.alone`."""
        return nullcontext()

    def wait(self, totals: Tensor | None = None) -> None:
        """See `Sharding.wait`: returns when the node has the gradients of all workers."""
        given = torch.zeros(0, dtype=torch.float64) if totals is None else totals
        sums, norms = self.window.totals(given)
        if totals is not None:
            totals.copy_(sums)
        self._norm = float(torch.linalg.vector_norm(norms))
        self.factor.grad = torch.ones_like(self.factor)

    def norm(self) -> float:
        """See `Sharding.norm`."""
        return self._norm

    def move(self, rate: float) -> None:
        """The nodes take one optimizer step."""
        assert self.factor.grad is not None, "a step ends after its gradients were summed"
        following = None if self.rate is None else self.rate(self.window.step + 1)
        self.window.move(float(self.factor.grad), rate, following)

    def refresh(self) -> None:
        """See `Sharding.refresh`: the first layers of the next step are pulled."""
        with suppress(StepLost):  # who needs them will notice
            self.window.prefetch(self.window.usual)

    def settle(self) -> None:
        """See `Sharding.settle`: the nodes' files hold all steps. Raises StepLost."""
        self.window.settle()

    def adopt(self) -> None:
        """See `Sharding.adopt`."""

    def idle(self, times: int) -> None:
        """See `Sharding.idle`: other workers need nothing of this one."""

    def bytes_held(self) -> Mapping[str, int]:
        """See `Sharding.bytes_held`: the most that the window ever had."""
        grads = max((2 * layer.bytes for layer in self.window.layers), default=0)
        return {"params": self.window.peak, "grads": grads, "masters": 0}

    def parts(self, optimizer: Optimizer) -> Mapping[str, Stateful]:
        """See `Sharding.parts`: where the state is."""
        return {"nodes": NodeState(self)}

    def detach(self) -> None:
        """See `Sharding.detach`."""
        self.window.keep()


class LocalSharding(NodeSharding):
    """See `NodeSharding`: in a round, this worker's own parameters are on its disk."""

    @property
    def local(self) -> LocalClient:
        """This worker's own model."""
        return cast("LocalClient", self.client)

    @property
    def steps(self) -> int:
        """See `NodeSharding.steps`."""
        return self.local.run

    def end_round(self, run: int, rate: float, stop: bool) -> bool:
        """See `LocalClient.end_round`."""
        self.window.drop()
        stopping = self.local.end_round(run, rate, stop)
        self.window.prefetch(self.window.usual)
        return stopping


class NodeOptimizer:
    """See `Optimizer`: the nodes' own. Has no state here."""

    def __init__(self, sharding: NodeSharding) -> None:
        self.sharding = sharding

    def step(self, factor: float) -> None:
        """See `Optimizer.step`."""
        self.sharding.move(factor)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is here."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is here."""


class NodeState:
    """What a checkpoint says of a model that nodes hold: their step and their layers. Stateful."""

    def __init__(self, sharding: NodeSharding) -> None:
        self.sharding = sharding

    def state_dict(self) -> dict[str, Any]:
        """The step, and the shape of each parameter by its name."""
        self.sharding.settle()
        layers = [one.layer for one in self.sharding.window.layers]
        tensors = {name: list(shape) for layer in layers for name, shape in layer.tensors}
        return {"step": self.sharding.steps, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError where the nodes' files are of another model, or of an earlier step than one that was damaged
        explains."""
        here = self.state_dict()
        if state["tensors"] != here["tensors"]:
            raise UserError(
                "The optimizer node holds another model than the checkpoint names.",
                do="give the node the folder of this run, or start a new run with --run FOLDER",
            )
        if state["step"] > here["step"] + 1:
            raise UserError(
                f"The optimizer node's files are of step {here['step']}, and the checkpoint is of step "
                f"{state['step']}.",
                why="the node's files are the state of the run",
                do="put back the node's folder, or start a new run with --run FOLDER",
            )


def hold(
    model: nn.Module,
    layers: Sequence[Layer],
    parameters: Sequence[Sequence[nn.Parameter]],
    device: torch.device = HOST,
) -> list[HeldLayer]:
    """The layers of `model`, none of them here. Parameters on the meta device are replaced; all else goes to a
    GPU too."""
    fresh: dict[int, nn.Parameter] = {}
    for one in (one for own in parameters for one in own):
        fresh[id(one)] = nn.Parameter(torch.empty(0, dtype=one.dtype)) if one.is_meta else one
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None and id(held) in fresh:
                module._parameters[name] = fresh[id(held)]
    found = [
        HeldLayer(layer, [fresh[id(one)] for one in own], device) for layer, own in zip(layers, parameters, strict=True)
    ]
    if device != HOST:
        model.to(device)
    return found


Connect = Callable[[Build, Sequence[Layer]], LayerClient]
"""Makes the connection of a worker to the nodes of its run."""


class ModelSkeleton(Mechanism):
    """The workload's own model without its values, which nodes have."""

    claim = SKELETON

    def wrap(self, context: Build) -> None:
        """Makes it. Raises UserError for a model with state that nodes do not hold."""
        context.model = model = context.workload.skeleton().model
        stateful = next((name for name, _ in model.named_buffers() if name in model.state_dict()), None)
        if stateful is not None:
            raise UserError(
                f"{type(model).__name__} cannot be held in layers: it has the buffer {stateful!r}.",
                why="layers hold parameters only",
                do='norms without running statistics, or leave role = "optimizer" out of the cluster; '
                "plan.pin.offload=none",
            )


class ModelOnNodes(Mechanism):
    """Parameters, gradients and optimizer states live on ranks with the role `optimizer`."""

    claim = CLAIM
    record = "luwu"

    def __init__(self, connect: Connect) -> None:
        self.connect = connect

    def wrap(self, context: Build) -> None:
        """Makes the window. Raises UserError for a model that cannot be held by layers."""
        assert context.model is not None
        context.window = window = make_window(context, self.connect)
        context.stalled = lambda: window.stalled
        context.meters["node"] = lambda: {**window.read(), **window.client.read()}
        if context.plan.outer is not None:
            context.sharding = LocalSharding(context.model, window)
            return
        train = context.recipe.train
        context.sharding = NodeSharding(
            context.model, window, lambda step: factor(train.schedule, step, train.steps or 0)
        )

    def resumed(self, context: Build) -> int | None:
        """The step of the nodes' files."""
        assert isinstance(context.sharding, NodeSharding)
        return context.sharding.steps or None

    def recovered(self, context: Build, error: Exception) -> int | None:
        """Where a node has started again, or its standby goes on."""
        assert isinstance(context.sharding, NodeSharding)
        if not isinstance(error, StepLost) or context.plan.outer is not None:
            return None
        return context.sharding.window.recover() if error.again is None else error.again

    def close(self, context: Build) -> None:
        """The nodes wait for this worker no more."""
        assert isinstance(context.sharding, NodeSharding)
        context.sharding.settle()
        context.sharding.client.close()


def make_window(context: Build, connect: Connect, stays: bool = True) -> LayerWindow:
    """The window of the context's model. Raises UserError for a model that cannot be held by layers, and where this
    rank's memory holds no layer."""
    model = context.model
    assert model is not None
    pieces = context.workload.pieces(model)
    if pieces is None:
        raise no_layers(model)
    layers, uses, parameters = layers_of(model, pieces.modules)
    _check_precision(parameters)
    size = window_size(layers, uses, context.plan.layer_window, rank_memory(context))
    malloc_trim.map_blocks()
    client = connect(context, layers)
    return LayerWindow(client, hold(model, layers, parameters, context.device), uses, size, stays)


class OptimizerOnNodes(Mechanism):
    """AdamW, run by the nodes."""

    claim = OPTIMIZER

    def wrap(self, context: Build) -> None:
        """Makes what tells them."""
        assert isinstance(context.sharding, NodeSharding)
        context.optimizer = NodeOptimizer(context.sharding)


def _check_precision(parameters: Sequence[Sequence[nn.Parameter]]) -> None:
    """Raises UserError unless all parameters are fp32."""
    other = next((one.dtype for own in parameters for one in own if one.dtype != torch.float32), None)
    if other is not None:
        raise UserError(
            f"Layers hold fp32 parameters, and the model's are {str(other).removeprefix('torch.')}.",
            do='train.precision = "fp32" or "bf16"',
        )


def on_nodes(plan: Plan) -> bool:
    """Whether ranks of the plan hold the model for the others."""
    return any(one.role == "optimizer" for one in plan.ranks)


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """The window, where the plan has optimizer nodes."""
    if not on_nodes(plan):
        return None
    from espalier.mechanisms.optimizer_node.role import connect  # sockets and files, which other runs do without

    return ModelOnNodes(connect)


def choose_skeleton(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """The model without values, where the plan has optimizer nodes, or parameters wait elsewhere."""
    return ModelSkeleton() if on_nodes(plan) or plan.offload.parameters in ("host", "disk") else None


def choose_optimizer(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """AdamW, where the plan has optimizer nodes."""
    return OptimizerOnNodes() if on_nodes(plan) and isinstance(recipe.train.optimizer, Adamw) else None
