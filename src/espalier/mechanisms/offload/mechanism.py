"""Offload as mechanisms: what of a run waits on disk or in host memory, as its plan says."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from espalier.mechanisms.offload.activations import ActivationStore, FilePlaces, HostPlaces, Places, SavedActivations
from espalier.mechanisms.offload.host_memory import DeviceFile, HostStates, HostWeights
from espalier.mechanisms.offload.optimizer import StateFolder
from espalier.mechanisms.offload.parameters import OffloadNode, OffloadSharding
from espalier.mechanisms.offload.state_file import TransferMeter
from espalier.parallel.layer_client import LayerClient, filler
from espalier.plan.axes.node_layout import FlatLayer
from espalier.plan.compose import Claim
from espalier.recipe import Adamw
from espalier.train.layer_window import make_window
from espalier.train.mechanism import Build, Mechanism
from espalier.train.window_sharding import WindowOptimizer

if TYPE_CHECKING:
    from espalier.plan.base import Plan, Tier
    from espalier.recipe import Recipe

OPTIMIZER = Claim(
    "offload_optimizer",
    question="optimizer states",
    changes={"states are on disk"},
    forbids={"states are copied"},
    after={"precision"},
)
HOST = Claim("offload_to_host", question="optimizer states", changes={"states wait in host memory"})

FROZEN = Claim(
    "offload_frozen",
    question="frozen weights",
    changes={"frozen weights wait in host memory"},
    forbids={"the model is cut", "experts are spread", "a window of layers", "replicas differ between rounds"},
)
PARAMETERS = Claim(
    "offload_parameters",
    question="shard",
    needs={"a model"},
    changes={"gradients are summed", "a window of layers", "parameters are offloaded", "states are on disk"},
    forbids={
        "the model is cut",
        "layers of one stage",
        "recomputes activations",
        "compiles blocks",
        "replicas differ between rounds",
        "states are copied",
    },
    after={"attend", "aggregate", "route", "precision", "matrices"},
    instead=("amsp",),
)
ACTIVATIONS = Claim(
    "offload_activations",
    question="activations",
    needs={"a model", "recomputes activations"},
    after={"precision"},
)
PIECES = Claim("offload_pieces", question="activations", needs={"a window of layers", "parameters are offloaded"})
ADAMW = Claim("adamw_offloaded", question="optimizer", needs={"parameters are offloaded"}, instead=("adamw",))


class OptimizerOnDisk(Mechanism):
    """The optimizer's states wait in a file; those for which the plan has memory stay there."""

    claim = OPTIMIZER

    def wrap(self, context: Build) -> None:
        """Says where optimizers keep their states."""
        folder = states_of(context, "disk")
        context.group = folder.group
        context.meters["offload"] = folder.meter.read
        predicted = context.plan.predicted
        if len(context.plan.ranks) == 1 and context.device.type == "cpu":
            folder.resident = 0 if predicted is None else int(predicted.memory_bytes.get("optimizer", 0.0))


class OptimizerOnHost(Mechanism):
    """The optimizer's states wait in host memory, where those of a processor are anyhow."""

    claim = HOST

    def wrap(self, context: Build) -> None:
        """Says where optimizers keep their states."""
        if context.device.type != "cpu":
            folder = HostStates(context.device)
            context.group = folder.group
            context.meters["offload"] = folder.meter.read


class FrozenOnHost(Mechanism):
    """Frozen weights of blocks wait in host memory, and are copied to the device block by block."""

    claim = FROZEN

    def wrap(self, context: Build) -> None:
        """Says what keeps them."""
        context.weights = weights = HostWeights(context.device)
        context.meters["frozen"] = weights.meter.read


class OffloadedParameters(Mechanism):
    """Parameters, gradients and optimizer states wait on a tier; a window of layers is on the device."""

    claim = PARAMETERS

    def __init__(self, tier: Tier) -> None:
        self.tier = tier

    def wrap(self, context: Build) -> None:
        """Makes the file, or takes the memory, and makes the window."""
        options = context.recipe.train.optimizer
        assert isinstance(options, Adamw), "composition refuses others"
        folder = states_of(context, self.tier)

        def connect(context: Build, layers: Sequence[FlatLayer]) -> LayerClient:
            fill = filler(layers, context.workload.skeleton().value)
            mesh = context.mesh
            peers = {} if context.cut is None else context.cut.peers
            everyone = mesh.mesh.same_parameters(mesh.rank)
            channels = [mesh.of(peers.get(layer.tensors[0][0], everyone)) for layer in layers]
            return OffloadNode(layers, options, fill, folder, channels)

        assert context.model is not None
        context.window = window = make_window(context, connect, stays=False)
        routes = [] if context.cut is None else [take_part for _, take_part in context.cut.idle]
        context.sharding = OffloadSharding(context.model, window, routes)
        context.meters["offload"] = folder.meter.read


class AdamwOffloaded(Mechanism):
    """AdamW on what waits there."""

    claim = ADAMW

    def wrap(self, context: Build) -> None:
        """Makes what steps it."""
        assert isinstance(context.sharding, OffloadSharding)
        context.optimizer = WindowOptimizer(context.sharding)


class OffloadedActivations(Mechanism):
    """What one block gives to the next waits in a file, or in host memory, until backward; `window`: where a window of
    layers is on the device, whose schedule says when."""

    def __init__(self, tier: Literal["host", "disk"], window: bool) -> None:
        self.tier = tier
        self.claim = PIECES if window else ACTIVATIONS

    def wrap(self, context: Build) -> None:
        """Puts what keeps them beside forward passes."""
        assert context.model is not None
        folder, name = place(context)
        meter = TransferMeter(self.tier)
        before = context.forward
        device = context.device
        places: Places = HostPlaces(device)
        if self.tier == "disk":
            places = FilePlaces(folder / f"{name}.activations", device)
        context.meters["activations"] = meter.read
        store = ActivationStore(places, meter)
        if self.claim is PIECES:
            context.activations = store
            return
        saved = SavedActivations(store, context.workload.blocks(context.model))

        @contextmanager
        def forward() -> Iterator[None]:
            with before(), saved.saving():
                yield

        context.forward = forward


def place(context: Build) -> tuple[Path, str]:
    """The folder for the scratch files of this rank, and what their names begin with."""
    if context.folder is None:
        return Path(tempfile.gettempdir()), f"espalier-{os.getpid()}-{context.mesh.rank}"
    return context.folder / "offload", f"rank{context.mesh.rank}"


def states_of(context: Build, tier: Tier) -> StateFolder:
    """What keeps states of this rank on a tier."""
    device = context.device
    if tier == "host":
        return HostStates(device)
    if device.type == "cpu":
        return StateFolder(*place(context))
    folder = StateFolder(*place(context), through=partial(DeviceFile, device=device))
    folder.device = device
    return folder


def choose_optimizer(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """What keeps the optimizer's states elsewhere, or steps what is there whole."""
    if plan.offload.parameters in ("host", "disk"):
        return AdamwOffloaded() if isinstance(recipe.train.optimizer, Adamw) else None
    return {"disk": OptimizerOnDisk(), "host": OptimizerOnHost()}.get(plan.offload.optimizer)


def choose_frozen(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """What keeps frozen weights elsewhere."""
    return FrozenOnHost()


def choose_parameters(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """What keeps parameters elsewhere."""
    tier = plan.offload.parameters
    return OffloadedParameters(tier) if tier in ("host", "disk") else None


def choose_activations(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the plan has them wait elsewhere."""
    tier = plan.offload.activations
    window = plan.offload.parameters != "device"
    return OffloadedActivations(tier, window) if tier in ("host", "disk") else None
