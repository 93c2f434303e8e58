"""`espalier.apply`: applies a plan to a user's own model and optimizer, in the user's own training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from espalier import comm
from espalier.kernels import accelerator
from espalier.launch.launchers import detect_launcher
from espalier.mechanisms.local_rounds.co2 import refuse_statistics
from espalier.mechanisms.local_rounds.outer_rounds import engine
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.mechanisms.sharding.broadcast import same_start
from espalier.mechanisms.sharding.mechanism import LOW
from espalier.mechanisms.sharding.sharded_optimizer import OptimizerPieces
from espalier.mechanisms.sharding.user_loop import UserLoop, refuse_split
from espalier.mechanisms.tensor_parallel.mechanism import share
from espalier.parallel.mesh import REPLICA, ProcessMesh, of_plan
from espalier.parallel.model_cut import ModelCut
from espalier.plan.axes.placement_plan import Spread, codecs, factors
from espalier.plan.base import Plan
from espalier.recipe import Adamw, Module, Recipe, Train
from espalier.recipe.errors import UserError
from espalier.train import rank_spec as launch
from espalier.train import table

TIMEOUT = 60.0
"""Seconds any wait for another rank may take."""

AnyModel = TypeVar("AnyModel", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def apply(
    plan: Plan, model: AnyModel, optimizer: AnyOptimizer, *, group: dist.ProcessGroup | None = None
) -> tuple[AnyModel, AnyOptimizer]:
    """Spreads a model and its optimizer over the ranks as `plan` says; then train them in an ordinary loop.

    Each rank computes the mean loss of its own share of a batch (`plan.ranks[rank].share`); what it gets back is the
    gradient of the mean over the whole batch. `backward`, `torch.nn.utils.clip_grad_norm_`, `optimizer.step`,
    `zero_grad`, learning-rate schedulers and both `state_dict`s (whole tensors; all ranks call them) work as in plain
    PyTorch. Backward passes that only accumulate go inside `with model.no_sync():`.

    Where the plan's replicas agree by rounds (`plan.replicas`), gradients are summed inside each replica, and replicas
    differ between rounds. All ranks call `model.finish()` after the last step: then they hold one model. (Without
    rounds it does nothing.)

    Args:
        plan: from `espalier.make_plan`.
        model: any module, on this rank's device; changed in place.
        optimizer: any optimizer that moves each number by itself (Adam, AdamW, SGD …), built on the model's parameters;
            changed in place. Others work where the plan leaves matrices whole.
        group: the ranks; None: torch's default group, which is joined by the launcher's variables when there is none.

    Returns:
        The same two objects.

    Raises:
        UserError: the plan is for another number of ranks, cuts layers or the sequence, shares matrices of a model that
            does not say how (`tp_plan`), or cuts matrices that the optimizer needs whole; or the ranks' models differ
            (the first difference is named).
    """
    refuse(plan)
    ranks = len(plan.trainers)
    channel = _channel(ranks) if group is None else group
    if (1 if channel is None else channel.size()) != ranks:
        raise UserError(
            f"The plan is for {ranks} ranks; this process group has {1 if channel is None else channel.size()}.",
            do="make_plan(…, ranks=the number you start), or start as many as the plan says",
        )
    _refuse(model, optimizer)
    _wrap_precision(plan, model)
    model.no_sync = contextlib.nullcontext  # type: ignore[assignment]
    model.finish = _nothing  # type: ignore[assignment]
    if channel is None or ranks == 1:
        return model, optimizer
    mesh = ProcessMesh(of_plan(plan), channel, channel.rank())
    cut = _share(mesh, model) if any(stage.tensor > 1 for stage in plan.stages) else None
    if plan.replicas:
        refuse_statistics(model)
        same_start(model, channel)
    sharding = _shard(plan, mesh, model, optimizer, cut)
    if plan.replicas:
        model.finish = _by_rounds(plan, mesh, optimizer, sharding)  # type: ignore[assignment]
    model._spread_by_espalier = True  # type: ignore[assignment]
    return model, optimizer


def refuse(plan: Plan) -> None:
    """Raises UserError for a plan that `espalier train` would not run either, or that changes a model's inside."""
    recipe = Recipe(model=Module(build=""), train=Train(optimizer=Adamw()))  # the caller's own take their place
    refusal = table.refusal(recipe, plan, table.APPLIED)
    if not plan.executable or refusal is not None:
        raise UserError(
            f"This plan cannot be applied: {plan.missing if refusal is None else refusal.reason}.",
            why="espalier.apply shards states and matrices, as it does not know the model's layers",
            do='make_plan(model, cluster, batch=…, sp=1, pp=1, recompute="none")',
        )


def _share(mesh: ProcessMesh, model: nn.Module) -> ModelCut:
    """Cuts the model over the ranks that share its matrices, by the plan that it carries."""
    assert mesh.replica is not None
    same_start(model, mesh.replica)
    cut = ModelCut(mesh.replica)
    share(model, None, mesh, cut)
    return cut


def _shard(
    plan: Plan, mesh: ProcessMesh, model: nn.Module, optimizer: torch.optim.Optimizer, cut: ModelCut | None
) -> Amsp | None:
    """The model spread over the ranks of this replica, which exchange at every step; None where it has one rank."""
    channel = mesh.replica if cut is None else mesh.same_parameters or mesh.alone
    if channel is None:
        return None
    ranks = mesh.mesh.members(mesh.rank, *REPLICA) if cut is None else mesh.mesh.same_parameters(mesh.rank)
    sharding = Amsp(model, channel, _spread(plan, ranks, model), cut)
    try:
        refuse_split(optimizer, sharding)
    except UserError:
        sharding.detach()
        raise
    OptimizerPieces(optimizer, sharding, channel)
    follow = UserLoop(sharding, optimizer, _weight(plan, ranks, mesh.rank), channel)
    _clear_with(optimizer, follow)
    return sharding


def _by_rounds(
    plan: Plan, mesh: ProcessMesh, optimizer: torch.optim.Optimizer, sharding: Amsp | None
) -> Callable[[], None]:
    """Lets replicas agree by rounds: every step of the optimizer is a local one. Returns what makes all one model."""
    live = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    engine_of_plan = engine(plan, mesh, live if sharding is None else [part.tensor for part in sharding.owned], TIMEOUT)
    if sharding is not None:

        def moved() -> None:
            sharding.adopt()
            sharding.settle()

        engine_of_plan.on_moving = sharding.settle
        engine_of_plan.on_moved = moved

    def rate() -> float:
        return float(optimizer.param_groups[0]["lr"])

    def finish() -> None:
        engine_of_plan.finish(rate())
        engine_of_plan.close()

    def stepped(*_: Any) -> None:
        engine_of_plan.after_step(rate())

    optimizer.register_step_post_hook(stepped)
    return finish


def _nothing() -> None:
    """All ranks hold one model after every step."""


def _refuse(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError for what was applied before, and for an optimizer that moves more than the model."""
    if hasattr(model, "_spread_by_espalier"):
        raise UserError("This model is sharded already.", do="call espalier.apply once")
    inside = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in inside:
                raise UserError(
                    f"The optimizer moves a parameter of shape {list(parameter.shape)} that is not in the model.",
                    why="its gradient would not be summed over the ranks",
                    do="register it in the model that is given to espalier.apply",
                )


def _spread(plan: Plan, ranks: Sequence[int], model: nn.Module) -> Spread:
    on_gpus = any(map(accelerator.is_on, model.parameters()))
    matrices = frozenset(name for name, parameter in model.named_parameters() if parameter.ndim >= 2)
    return Spread(
        factors=factors(plan.units),
        nodes=() if on_gpus else [plan.ranks[rank].node for rank in ranks],
        whole=matrices if any(unit.whole for unit in plan.units) else frozenset(),
        codecs=codecs(plan.exchanges),
        bucket_bytes=plan.bucket,
        prefetch=plan.prefetch,
        low=LOW.get(plan.precision) if any(unit.optimizer for unit in plan.units) else None,
    )


def _weight(plan: Plan, ranks: Sequence[int], rank: int) -> float:
    """A rank's share of what `ranks` compute together."""
    sizes = {index: plan.ranks[index].samples for index in ranks}
    return sizes[rank] / sum(sizes.values()) if any(sizes.values()) else 1 / len(sizes)


def _channel(ranks: int) -> Any:
    """The ranks as a Channel, None for one alone."""
    if dist.is_initialized():
        world = dist.group.WORLD
        return world if isinstance(world, comm.Channel) else dist.new_group(backend="espalier")
    place = detect_launcher.place()
    if place is None or place.world == 1:
        if ranks > 1:
            raise UserError(
                f"The plan is for {ranks} ranks, and there is no process group.",
                do=f"torchrun --nproc-per-node {ranks} your_script.py",
            )
        return None
    inner = "nccl" if accelerator.available() else "gloo"
    store = launch.store(place, TIMEOUT)
    return comm.connect(store, place.rank, place.world, timeout=TIMEOUT, inner=inner)


def _wrap_precision(plan: Plan, model: nn.Module) -> None:
    narrow = [name for name, parameter in model.named_parameters() if parameter.dtype != torch.float64]
    if plan.precision == "fp64" and narrow:
        raise UserError(
            f"The plan is for fp64, and '{narrow[0]}' is {model.get_parameter(narrow[0]).dtype}.", do="model.double()"
        )
    if plan.precision == "bf16":
        device = next(model.parameters()).device.type
        model.forward = torch.autocast(device, torch.bfloat16)(model.forward)


def _clear_with(optimizer: torch.optim.Optimizer, follow: UserLoop) -> None:
    plain = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        plain(set_to_none=True)
        follow.clear()

    def add_param_group(param_group: Any) -> None:
        raise UserError(
            "A parameter group was added to a sharded optimizer.",
            do="add all groups before espalier.apply; freeze those that train later with requires_grad_(False)",
        )

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
