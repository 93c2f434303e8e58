"""Wraps a model in what its plan asks for: `build`, and the mechanisms that change the model itself.

These know nothing of ranks: precision, recomputation, compilation. All others lie in `espalier.mechanisms`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch import nn

from espalier.kernels import accelerator
from espalier.plan.compose import Claim
from espalier.recipe import Adapters, Precision
from espalier.recipe.errors import Interrupted, UserError
from espalier.train.mechanism import Build, Mechanism
from espalier.train.wrap_policy import Membership

if TYPE_CHECKING:
    from espalier.checkpoint.base import StatefulParts
    from espalier.optim.base import Optimizer
    from espalier.parallel.agreement import Agreement
    from espalier.parallel.mesh import ProcessMesh
    from espalier.parallel.schedule import Schedule
    from espalier.parallel.sharding import Sharding
    from espalier.train.rank_setup import RankSetup

DTYPES = dict.fromkeys(get_args(Precision), torch.float32) | {"fp64": torch.float64}
"""Precision of the parameters. With bf16 and fp16 they stay fp32 (the master weights); autocast computes in these."""

MODEL = Claim("model", question="model", changes={"a model"}, after={"frozen weights"})
SKELETON = Claim("skeleton", question="model", changes={"a model"})
SELECTIVE = Claim(
    "recompute_selective",
    question="recompute",
    needs={"a model"},
    changes={"recomputes activations"},
    instead=("recompute_block",),
    option="train.recompute=selective",
)
BLOCK = Claim(
    "recompute_block",
    question="recompute",
    needs={"a model"},
    changes={"recomputes activations"},
    instead=("recompute_selective",),
    option="train.recompute=block",
)
BF16 = Claim("bf16", question="precision", option="train.precision=bf16")
FP16 = Claim(
    "fp16",
    question="precision",
    changes={"the loss is scaled"},
    forbids={"sums are encoded", "rows cross in few bits"},
    instead=("bf16",),
)
"""A codec keeps back what it loses of a gradient, in units of a factor that changes and of steps that are left out.
Rows in few bits cannot say that a gradient overflowed, for which a step is left out."""
TF32 = Claim("tf32", question="precision")
COMPILE = Claim(
    "compile",
    question="compile",
    needs={"a model"},
    changes={"compiles blocks"},
    after={"recompute", "attend", "route"},
)


class BuildModel(Mechanism):
    """The workload's own model, whole and with its initial weights."""

    claim = MODEL

    def wrap(self, context: Build) -> None:
        """Makes it; weights under adapters wait in host memory until they are sharded, where they are."""
        workload = context.workload
        device = context.device
        adapted = device.type != "cpu" and isinstance(context.recipe.tune, Adapters)
        shards = adapted and (context.weights or any(len(unit.params) > 1 for unit in context.plan.units))
        model = workload.build(torch.device("cpu") if shards else device, DTYPES[context.plan.precision])
        member = Membership(model, workload.blocks(model))
        for tensor in (*model.parameters(), *model.buffers()) if shards else ():
            waits = isinstance(tensor, nn.Parameter) and not tensor.requires_grad and member.of(tensor) is not None
            tensor.data = tensor.data if waits else tensor.data.to(device)
        context.model = model


class ModelSkeleton(Mechanism):
    """The workload's own model without its values, which wait elsewhere."""

    claim = SKELETON

    def wrap(self, context: Build) -> None:
        """Makes it. Raises UserError for a model with state that layers do not hold."""
        context.model = model = context.workload.skeleton().model
        stateful = next((name for name, _ in model.named_buffers() if name in model.state_dict()), None)
        if stateful is not None:
            raise UserError(
                f"{type(model).__name__} cannot be held in layers: it has the buffer {stateful!r}.",
                why="layers hold parameters only",
                do='norms without running statistics, or leave role = "optimizer" out of the cluster; '
                "plan.pin.offload=none",
            )


class Recompute(Mechanism):
    """Activations are computed again in backward."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.claim = {"selective": SELECTIVE, "block": BLOCK}[mode]

    def wrap(self, context: Build) -> None:
        assert context.model is not None
        context.workload.recompute(context.model, self.mode)


class Autocast(Mechanism):
    """Forward and backward compute in bfloat16 where that is safe (autocast)."""

    claim = BF16

    def wrap(self, context: Build) -> None:
        """Sets the context of forward passes."""
        context.forward = partial(torch.autocast, context.device.type, torch.bfloat16)


class Fp16(Mechanism):
    """Forward and backward compute in float16 where that is safe (autocast), with a scaled loss."""

    claim = FP16

    def wrap(self, context: Build) -> None:
        """Sets the context of forward passes, and the scale."""
        from espalier.optim.loss_scale import LossScale

        context.forward = partial(torch.autocast, context.device.type, torch.float16)
        context.loss_scale = LossScale()

    def state(self, context: Build, parts: StatefulParts) -> StatefulParts:
        assert context.loss_scale is not None
        return {**parts, "loss scale": context.loss_scale}


class Tf32(Mechanism):
    """Products of fp32 matrices round their inputs to 10 bits of mantissa, which tensor cores multiply."""

    claim = TF32

    def wrap(self, context: Build) -> None:
        """Tells torch, for this process."""
        torch.set_float32_matmul_precision("high")
        accelerator.round_convolutions(True)


PRECISIONS: Mapping[str, type[Mechanism]] = {"bf16": Autocast, "fp16": Fp16, "tf32": Tf32}
"""What else than dtypes makes a precision."""


class Compile(Mechanism):
    """Each block's forward goes through `torch.compile`."""

    claim = COMPILE

    def wrap(self, context: Build) -> None:
        assert context.model is not None
        compile_blocks(context.workload.blocks(context.model))


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compiles each block in place. Raises UserError when there is no compiler to do it with."""
    if not accelerator.available() and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        raise UserError(
            "train.compile = true needs a C++ compiler, and none is on the PATH.",
            do="apt-get install g++, or train.compile = false",
        )
    for block in blocks:
        # The forward alone: hooks that bring its parameters stay outside.
        block.forward = torch.compile(block.forward)


# --- the order in which a plan wraps a model -----------------------------------------------------------------------


class Built(NamedTuple):
    """A model with everything its plan wraps round it."""

    model: nn.Module
    sharding: Sharding
    optimizer: Optimizer
    schedule: Schedule
    agreement: Agreement
    context: Build
    mechanisms: Sequence[Mechanism]

    def parts(self) -> StatefulParts:
        """Everything that has state, by name."""
        parts = self.sharding.parts(self.optimizer)
        for mechanism in self.mechanisms:
            parts = mechanism.state(self.context, parts)
        return parts

    def resumed(self) -> int | None:
        """Steps of the state that a mechanism has taken up by itself; None: there is none."""
        steps = [mechanism.resumed(self.context) for mechanism in self.mechanisms]
        return max((step for step in steps if step is not None), default=None)

    def recovered(self, error: Exception) -> int | None:
        """The step to be made now, where a mechanism can go on after `error`; None: none can."""
        steps = (mechanism.recovered(self.context, error) for mechanism in self.mechanisms)
        return next((step for step in steps if step is not None), None)

    def close(self) -> None:
        """Ends what the mechanisms have begun."""
        for mechanism in self.mechanisms:
            mechanism.close(self.context)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Closes it behind the last step, or abandons it where an error ends this rank."""
        try:
            yield
        except Interrupted:
            self.close()
            raise
        except BaseException:
            for mechanism in self.mechanisms:
                mechanism.abandon(self.context)
            raise
        self.close()


def build(setting: RankSetup, mesh: ProcessMesh, mechanisms: Sequence[Mechanism]) -> Built:
    """Wraps the workload's model in the mechanisms of its plan, in the order given (`train.table.ordered`)."""
    context = Build(
        setting.recipe,
        setting.plan,
        setting.workload,
        mesh,
        setting.device,
        folder=setting.folder,
        meters=dict(setting.workload.meters),
        reconnects=setting.place.pulse.reconnects,
    )
    for mechanism in mechanisms:
        mechanism.wrap(context)
    model = context.model
    sharding = context.sharding
    optimizer = context.optimizer
    schedule = context.schedule
    agreement = context.agreement
    assert model is not None and sharding is not None and optimizer is not None, "a plan shards a model and moves it"  # noqa: PT018
    assert schedule is not None and agreement is not None, "a plan has a schedule and an agreement"  # noqa: PT018
    return Built(model, sharding, optimizer, schedule, agreement, context, mechanisms)
