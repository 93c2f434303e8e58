"""Offload as mechanisms: what of a run waits on disk, as its plan says."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import espalier.shard.luwu.mechanism as luwu
from espalier.compose import Claim
from espalier.config import Adamw
from espalier.mechanism import Build, Mechanism
from espalier.shard.luwu.base import Client, Layer, filler
from espalier.shard.offload.activations import ActivationFile
from espalier.shard.offload.host_memory import DeviceFile, HostStates
from espalier.shard.offload.optimizer import StateFolder
from espalier.shard.offload.parameters import DiskNode, DiskSharding
from espalier.shard.offload.state_file import TransferMeter

if TYPE_CHECKING:
    from espalier.config import Recipe
    from espalier.plan.base import Plan

OPTIMIZER = Claim(
    "offload_optimizer",
    question="optimizer states",
    changes=frozenset({"states are on disk"}),
    forbids=frozenset({"states are copied"}),
)
HOST = Claim("offload_to_host", question="optimizer states", changes=frozenset({"states wait in host memory"}))


PARAMETERS = Claim(
    "offload_parameters",
    question="shard",
    needs=frozenset({"a model"}),
    changes=frozenset({"gradients are summed", "a window of layers", "parameters are on disk", "states are on disk"}),
    forbids=frozenset(
        {
            "the model is cut",
            "layers of one stage",
            "recomputes activations",
            "compiles blocks",
            "replicas differ between rounds",
            "states are copied",
            "computes on GPUs",
        }
    ),
    after=frozenset({"attend", "aggregate", "route", "precision", "matrices"}),
    instead=("amsp",),
)
ACTIVATIONS = Claim(
    "offload_activations",
    question="activations",
    needs=frozenset({"a model", "recomputes activations"}),
    forbids=frozenset({"computes on GPUs"}),
    after=frozenset({"precision"}),
)
ADAMW = Claim("adamw_on_disk", question="optimizer", needs=frozenset({"parameters are on disk"}), instead=("adamw",))


class OptimizerOnDisk(Mechanism):
    """The optimizer's states wait in a file."""

    claim = OPTIMIZER

    def wrap(self, context: Build) -> None:
        """Says where optimizers keep their states."""
        device = context.device
        folder = StateFolder(*place(context))
        if device.type != "cpu":
            folder = StateFolder(*place(context), through=partial(DeviceFile, device=device))
        context.group = folder.group
        context.meters["offload"] = folder.tier.meter.read


class OptimizerOnHost(Mechanism):
    """The optimizer's states wait in host memory, where those of a processor are anyhow."""

    claim = HOST

    def wrap(self, context: Build) -> None:
        """Says where optimizers keep their states."""
        if context.device.type != "cpu":
            folder = HostStates(context.device)
            context.group = folder.group
            context.meters["offload"] = folder.meter.read


class ParametersOnDisk(Mechanism):
    """Parameters, gradients and optimizer states wait in a file; a window of layers is in memory."""

    claim = PARAMETERS

    def wrap(self, context: Build) -> None:
        """Makes the file and the window."""
        options = context.recipe.train.optimizer
        assert isinstance(options, Adamw), "composition refuses others"
        folder = StateFolder(*place(context))

        def connect(context: Build, layers: Sequence[Layer]) -> Client:
            fill = filler(layers, context.workload.skeleton().value)
            return DiskNode(layers, options, fill, folder, context.mesh.same_parameters)

        assert context.model is not None
        context.window = window = luwu.make_window(context, connect)
        context.sharding = DiskSharding(context.model, window)
        context.meters["offload"] = folder.tier.meter.read


class AdamwOnDisk(Mechanism):
    """AdamW on what waits there."""

    claim = ADAMW

    def wrap(self, context: Build) -> None:
        """Makes what steps it."""
        assert isinstance(context.sharding, DiskSharding)
        context.optimizer = luwu.NodeOptimizer(context.sharding)


class ActivationsOnDisk(Mechanism):
    """What one block gives to the next waits in a file until backward."""

    claim = ACTIVATIONS

    def wrap(self, context: Build) -> None:
        """Puts the file beside forward passes."""
        assert context.model is not None
        folder, name = place(context)
        meter, before = TransferMeter("disk"), context.forward
        file = ActivationFile(folder / f"{name}.activations", context.workload.blocks(context.model), meter)

        @contextmanager
        def forward() -> Iterator[None]:
            with before(), file.saving():
                yield

        context.forward = forward
        context.meters["activations"] = meter.read


def place(context: Build) -> tuple[Path, str]:
    """The folder for the scratch files of this rank, and what their names begin with."""
    if context.folder is None:
        return Path(tempfile.gettempdir()), f"espalier-{os.getpid()}-{context.mesh.rank}"
    return context.folder / "offload", f"rank{context.mesh.rank}"


def choose_optimizer(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """What keeps the optimizer's states on disk, or steps what is there whole."""
    if plan.offload.parameters == "disk":
        return AdamwOnDisk() if isinstance(recipe.train.optimizer, Adamw) else None
    return {"disk": OptimizerOnDisk(), "host": OptimizerOnHost()}.get(plan.offload.optimizer)


def choose_parameters(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """What keeps parameters on disk."""
    return ParametersOnDisk() if plan.offload.parameters == "disk" else None


def choose_activations(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the plan has them wait on disk."""
    return ActivationsOnDisk() if plan.offload.activations == "disk" else None
