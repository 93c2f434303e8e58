"""Optimizer node as a rank of a run: it makes or opens its files, says where it listens, and serves until all workers
have left.

The files of the nodes are the run's checkpoint: in `optimizer/node-0` and so on of the run's folder, or in the folder
that `store.path` names. They hold the newest whole step, whatever ended the process that wrote them.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from espalier import plain_collectives
from espalier.config import Adamw
from espalier.errors import RunFailed, UserError
from espalier.shard.luwu.base import Layer, filler, layers_of
from espalier.shard.luwu.client import Client
from espalier.shard.luwu.layout import Job
from espalier.shard.luwu.node import OptimizerNode
from espalier.shard.luwu.state_file import open_state, open_sums, read_layer

if TYPE_CHECKING:
    from espalier.config import Recipe
    from espalier.mechanism import Build
    from espalier.plan.base import Plan
    from espalier.workload import Workload

PUSHED = {"exact": "fp32", "int8": "int8"}
"""How gradients cross the wire, by the codec of the plan's exchange of gradients."""


@dataclass(frozen=True)
class NodePlace:
    """An optimizer node of a run.

    Attributes:
        recipe, plan, workload: of the run.
        rank: among all ranks of the run.
        folder: where the state is, unless the recipe names another place.
        host: an address that workers reach; of it the node takes the own address on the way there.
        new: nothing of the run was there before.
    """

    recipe: Recipe
    plan: Plan
    workload: Workload
    rank: int
    folder: Path
    host: str
    new: bool = False

    @property
    def number(self) -> int:
        """Among the nodes."""
        return ranks_of(self.plan, "optimizer").index(self.rank)

    @property
    def state(self) -> Path:
        """The folder of its files."""
        return folder_of(self.recipe, self.folder, self.number)


def folder_of(recipe: Recipe, run: Path, number: int) -> Path:
    """Where node `number` of the run in `run` keeps its files: there, or where the recipe says."""
    said = None if recipe.store is None else recipe.store.path
    first = said if said is None or isinstance(said, str) else said[0]
    return (run / "optimizer" if first is None else Path(first)) / f"node-{number}"


def ranks_of(plan: Plan, role: str) -> list[int]:
    """The ranks of that role."""
    return [rank for rank, one in enumerate(plan.ranks) if one.role == role]


def job_of(recipe: Recipe, plan: Plan, layers: Sequence[Layer]) -> Job:
    """What nodes and workers agree on. Raises UserError where the plan asks for what they cannot do."""
    options = recipe.train.optimizer
    if not isinstance(options, Adamw):
        raise UserError(
            f"train.optimizer.kind = {options.__struct_config__.tag!r}, and an optimizer node runs AdamW.",
            do='train.optimizer.kind = "adamw"',
        )
    codecs = {one.codec for one in plan.exchanges if one.traffic == "gradients"} or {"exact"}
    unknown = sorted(codecs - set(PUSHED))
    if unknown or len(codecs) > 1:
        raise UserError(
            f"An optimizer node cannot add up gradients in the codec {', '.join(sorted(codecs))!r}.",
            do=f"comm.codec = {' or '.join(map(repr, PUSHED))}",
        )
    return Job(tuple(layers), options, PUSHED[codecs.pop()], workers=len(plan.trainers))  # type: ignore[arg-type]


# --- the node ------------------------------------------------------------------------------------------------------


def serve(place: NodePlace, channel: dist.ProcessGroup | None, stepped: Callable[[int], None]) -> int:
    """The life of a node: returns its step when all workers have left. `stepped` is called with each new step.

    Raises UserError where its files are of another model, or cannot be written.
    """
    model, value = place.workload.skeleton()
    pieces = place.workload.pieces(model)
    layers = layers_of(model, pieces.modules)[0] if pieces is not None else []
    whole = job_of(place.recipe, place.plan, layers)
    numbers = whole.part(len(ranks_of(place.plan, "optimizer")))[place.number]
    job = replace(whole, layers=tuple(layers[number] for number in numbers))
    state = open_state(place.state, job, filler(job.layers, value))
    with closing(state), _door(place.host) as door:
        if place.new and state.step:
            raise UserError(
                f"{place.state} is of step {state.step}, and the run is new.",
                do="name another folder in store.path, or the run's own with --run FOLDER",
            )
        token = secrets.token_hex(16)
        tokens = _told((*door.getsockname()[:2], token), channel)
        node = OptimizerNode(
            job, (state, open_sums(place.state, job)), door, next(one[2] for one in tokens if one)
        ).start()
        try:
            _until_left(node, len(place.plan.trainers), stepped)
        finally:
            node.close()
        return state.step


def _until_left(node: OptimizerNode, workers: int, stepped: Callable[[int], None]) -> None:
    """Returns when every worker has come and left. Raises what the node failed with."""
    came, step = 0, -1
    while True:
        if node.error is not None:
            raise node.error
        here = len(node.reduction.members)
        came = max(came, here)
        if came == workers and not here:
            return
        if node.state.step != step:
            step = node.state.step
            stepped(step)
        time.sleep(0.02)


def _door(host: str) -> socket.socket:
    """Listens at the address of this machine from which `host` is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = probe.getsockname()[0]
    return socket.create_server((own, 0))


def _told(own: Any, channel: dist.ProcessGroup | None) -> list[Any]:
    """What every rank of the run says of itself; all call it once, as they begin."""
    return [own] if channel is None else plain_collectives.all_gather(own, channel)


# --- the model without its nodes ------------------------------------------------------------------------------------


@torch.no_grad()
def load_into(model: nn.Module, workload: Workload, recipe: Recipe, plan: Plan, run: Path) -> int:
    """Fills `model`, which is whole, from the files of the nodes of the run in `run`. Returns their step.

    Raises UserError where a node's files are not here, or are of another step than the first's.
    """
    pieces = workload.pieces(model)
    assert pieces is not None, "a run on nodes has a model in pieces"
    layers, _, parameters = layers_of(model, pieces.modules)
    whole, steps = job_of(recipe, plan, layers), []
    parts = whole.part(len(ranks_of(plan, "optimizer")))
    for node, numbers in enumerate(parts):
        folder = folder_of(recipe, run, node)
        if not (folder / "state").exists():
            raise UserError(
                f"The files of optimizer node {node} are not in {folder}.",
                why="they hold the run's model",
                do="copy them there from the host of that node",
            )
        job = replace(whole, layers=tuple(layers[number] for number in numbers))
        with closing(open_state(folder, job, lambda *_: None)) as state:
            steps.append(state.step)
            for local, number in enumerate(numbers):
                values = read_layer(state, job, local)[0]
                for parameter, value in zip(parameters[number], layers[number].views(values), strict=True):
                    parameter.copy_(value)
    if len(set(steps)) > 1:
        raise UserError(
            f"The optimizer nodes' files are of steps {', '.join(map(str, steps))}.",
            do="run espalier train again: nodes come to the same step when they meet",
        )
    return steps[0]


# --- a worker's way there ------------------------------------------------------------------------------------------


def connect(context: Build, layers: Sequence[Layer]) -> Client:
    """The connection of a worker to the nodes of its run. All ranks of the run take part.

    Raises RunFailed where no node says where it is.
    """
    job = job_of(context.recipe, context.plan, layers)
    told = _told(None, context.mesh.channel)
    nodes = [told[rank] for rank in ranks_of(context.plan, "optimizer")]
    if None in nodes:
        raise RunFailed("A rank is planned as an optimizer node, and does not say where it listens.")
    token = next(one[2] for one in told if one)
    client = Client([[(host, port)] for host, port, _ in nodes], context.mesh.rank, job, token)
    client.ledger = getattr(context.mesh.channel, "ledger", client.ledger)
    return client
