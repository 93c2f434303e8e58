"""Pipeline parallelism as mechanisms: the plan's stages cut the model, and its schedule runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from espalier.comm.base import Traffic
from espalier.mechanisms.pipeline.pipeline import PipelinePasses
from espalier.parallel.mesh import ProcessMesh
from espalier.parallel.model_cut import ModelCut
from espalier.parallel.schedule import PIPELINE
from espalier.parallel.stage_messages import StageMessages
from espalier.plan.axes.pipeline import hand_overs
from espalier.plan.compose import Claim
from espalier.recipe.errors import UserError
from espalier.train.mechanism import Build, Mechanism

if TYPE_CHECKING:
    from espalier.checkpoint.base import Stateful, StatefulParts
    from espalier.parallel.action_list import ActionLists, Pipeline
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

STAGES = Claim(
    "model_stages",
    question="model stages",
    needs={"a model"},
    changes={"layers of one stage"},
    after={"matrices", "tensor"},
)
GPIPE = replace(PIPELINE, name="gpipe", instead=("1f1b",), option="")
ZERO_BUBBLE = replace(
    GPIPE,
    name="zero_bubble",
    forbids={"compiles blocks", "parameters are gathered", "feed-forwards by chunks"},
)
"""Gradients of weights are computed when their block is not at work any more: neither gathered nor compiled, and its
activations are still there."""
CLAIMS = {schedule.name: schedule for schedule in (PIPELINE, GPIPE, ZERO_BUBBLE)}


PASSES = ("forward", "backward", "recompute", "launch")
"""Terms of a prediction that a stage repeats for each micro-batch."""


class CutModel(Mechanism):
    """A rank keeps the layers of its stages."""

    claim = STAGES

    def wrap(self, context: Build) -> None:
        """Frees all others. Raises UserError for a model that cannot be cut, or not as the plan says."""
        from espalier.parallel import model_stages

        model = context.model
        workload = context.workload
        mesh = context.mesh
        assert model is not None
        pieces = workload.pieces(model)
        if pieces is None:
            raise model_stages.no_pieces(model)
        model_stages.check_trained(model, pieces)
        placed = model_stages.pipelines(context.plan, len(workload.tasks()))
        model_stages.check_layers(placed, len(pieces.blocks))
        rank = _alike(mesh)[mesh.rank]
        mine = next(placement for placement in placed if rank in placement.pipeline.ranks)

        def again() -> Any:
            return workload.pieces(model)

        assert mesh.replica is not None, "a pipeline has several ranks"
        context.cut = context.cut or ModelCut(mesh.replica)
        context.stages = model_stages.ModelStages(model, again, mine, rank, context.cut.stream)
        model_stages.check_borrowed(context.stages)
        if context.plan.unequal:
            model_stages.add_peers(context.cut, context.stages, placed, _alike(mesh), mesh.rank)
            if context.cut.recut and any(stage.sequence > 1 for stage in context.plan.stages):
                raise UserError(
                    "Pipelines share matrices of a layer over unlike numbers of ranks, and sequences too.",
                    why="gradients of ranks that share sequences are summed over ranks that hold the same part",
                    do="the same `tensor` for each layer in all pipelines, or no shared sequences",
                )


class Pipelined(Mechanism):
    """The ranks of a pipeline run their action lists."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule
        self.claim = CLAIMS.get(schedule, PIPELINE)

    def wrap(self, context: Build) -> None:
        """Makes the schedule. Raises UserError where the plan's lists cannot be run."""
        from espalier.mechanisms.pipeline import schedules
        from espalier.mechanisms.pipeline.pipeline import PipelineSchedule
        from espalier.mechanisms.pipeline.split_backward import WeightGradients

        stages, sharding, mesh, model = context.stages, context.sharding, context.mesh, context.model
        assert stages is not None
        assert sharding is not None
        assert model is not None
        alike = _alike(mesh)
        places = {alike[rank]: place for place, rank in enumerate(_members(mesh))}
        split = self.schedule == "zero_bubble"
        passes = PipelinePasses(
            context.workload.nominal_weight,
            sharding.accumulate,
            context.forward,
            sharding.alone,
            WeightGradients(model) if split else None,
            tuple(context.workload.tasks().values()),
            context.loss_scale,
        )
        mesh.encode(Traffic.ACTIVATIONS, mesh.replica, context.plan)
        messages = StageMessages(mesh.replica, places, context.device)
        context.stalled = lambda: messages.waited
        more = ahead(context.plan, stages.layers)

        def lists(pipeline: Pipeline) -> ActionLists:
            return schedules.action_lists([pipeline], self.schedule, more)

        made = PipelineSchedule(alike[mesh.rank], stages, messages, lists, passes)
        made.actions(stages.pipeline.micro_batches)
        context.schedule = made
        if context.plan.unequal:  # the groups that checkpoints ask for, of unlike numbers of ranks
            self.state(context, {})
            mesh.number_groups_alike()

    def state(self, context: Build, parts: StatefulParts) -> StatefulParts:
        """The parts with the names of the whole model; what a codec keeps back is each stage's own."""
        stages = context.stages
        alike = _alike(context.mesh)
        assert stages is not None
        ranks = tuple(sorted(rank for rank in alike if alike[rank] in stages.pipeline.ranks))
        group = context.mesh.of(ranks) or context.mesh.alone
        states: dict[str, Stateful] = {}
        for name, part in parts.items():
            if name.startswith("feedback of"):  # of parameters, whose holders may stand in unlike stages
                states[name] = part
            elif name.startswith("feedback"):
                states[f"{name} of stage {stages.local_stages[0]}"] = part
            else:
                from espalier.checkpoint.all_names import AllNames

                states[name] = AllNames(part, group)
        return states


def ahead(plan: Plan, layers: Sequence[tuple[int, int]]) -> list[int]:
    """Further forward passes that each stage begins with, as the plan's links and free memory allow: see
    `schedules.warm_up_for_links`. None where nothing was predicted, or a rank holds several stages."""
    predicted = plan.predicted
    count = max(1, plan.stages[0].micro_batches)
    if predicted is None or plan.interleave > 1 or len(layers) == 1:
        return []
    each = sum(predicted.terms.get(name, 0.0) for name in PASSES) / count
    sizes = [last - first for first, last in layers]
    if not each:
        return []
    link = predicted.terms.get("send", 0.0) / float(hand_overs(len(sizes), count, ahead=True))
    alike = plan.planner == "flashflex"  # the more layers, the faster the device
    passes = [each * (1.0 if alike else size / max(sizes)) for size in sizes]
    from espalier.mechanisms.pipeline import schedules

    more = schedules.warm_up_for_links(passes, [link] * (len(sizes) - 1))
    memory = predicted.memory_bytes
    bytes_of_one = memory.get("activations", 0.0) / min(len(sizes), count)
    room = predicted.memory_limit - memory.get("peak", 0.0)
    most = int(min(count, room / bytes_of_one)) if bytes_of_one and room > 0 else 0
    return [min(extra, most) for extra in more]


def _members(mesh: ProcessMesh) -> list[int]:
    """The trainers of this rank's replica in the order of their process group."""
    ranks = mesh.replica_ranks
    group = mesh.replica
    world, local_ranks = (dist.get_process_group_ranks(group_of) for group_of in (mesh.channel, group))
    return sorted(ranks, key=lambda rank: local_ranks.index(world[rank]))


def _alike(mesh: ProcessMesh) -> dict[int, int]:
    """Of each rank of this replica, the one of the first replica in its place: plans name the stages of that."""
    first = {coordinates: rank for rank, coordinates in mesh.mesh.coordinates.items()}
    members = mesh.replica_ranks
    return {rank: first[mesh.mesh.coordinates[rank]._replace(replica=0)] for rank in members}


# --- rows of the table of mechanisms -------------------------------------------------------------------------------


def choose_stages(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where there are several stages."""
    return CutModel() if _several(plan) else None


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """The plan's schedule, where there are several stages."""
    return Pipelined(plan.schedule) if _several(plan) else None


def _several(plan: Plan) -> bool:
    return len({stage.layers for stage in plan.stages}) > 1 or plan.unequal
