"""Waves: each rank runs slices of the towers and heads of several tasks, on groups that change from wave to wave.

After Spindle (arXiv 2409.03365). A slice is some operators of a tower on the batch of one task; its ranks divide the
samples. Between slices samples go to the ranks that have them next, and their gradients the same way back. A wave is no
barrier: a rank starts its next slice when the inputs are there. Parameters are held by the ranks whose slices use them,
and their gradients are summed over these once a step (`ModelCut.peers`); the loss is divided by the weight of the whole
step before backward, so that tasks and samples count alike wherever they are computed.

Where memory asks for it, passes are nested as in BigMac (arXiv 2605.25451): the samples of each task go through the
waves in micro-batches, and a micro-batch's backward passes run before the forward passes of the next but one. Towers
then compute in the slots that the decoder behind them leaves, and keep the activations of two micro-batches.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.checkpoint.all_names import AllNames
from espalier.mechanisms.task_waves.state import TaskWavesState, crossings, rows
from espalier.parallel.model_cut import ModelCut
from espalier.parallel.model_stages import free
from espalier.parallel.schedule import Accumulate, Loss
from espalier.parallel.stage_messages import MessageForm, StageMessages, shapes_of
from espalier.parallel.workload import HEAD, Outcome, TaskNode
from espalier.plan.axes.pipeline import NESTED_IN_FLIGHT
from espalier.plan.compose import Claim
from espalier.recipe.errors import UserError
from espalier.train.mechanism import Build, Mechanism
from espalier.train.whole_model import divisor, outcome

if TYPE_CHECKING:
    from espalier.checkpoint.base import StatefulParts
    from espalier.mechanisms.task_waves.state import WaveSlice
    from espalier.optim.loss_scale import LossScale
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe
    from espalier.tasks.towers import Fields, MultitaskModel

TOWERS = Claim(
    "towers_of_rank",
    question="model stages",
    needs={"a model"},
    changes={"layers of one stage"},
    after={"matrices", "tensor"},
)
WAVES = Claim(
    "waves",
    question="stages",
    needs={"gradients are summed", "layers of one stage"},
    changes={"a schedule of stages"},
)


TaskFields = Mapping[int, Any]
"""Of each task that has samples, their fields."""


class SliceRoute(NamedTuple):
    """An edge between slices: the output of slice `source` is input `place` of slice `target`."""

    source: int
    target: int
    place: int


class Slices:
    """The slices of a plan in order, with the routes between them. Immutable.

    Raises:
        UserError: operators of a task are run by nobody, twice, or out of order.
    """

    def __init__(self, plan: Plan, tasks: Sequence[str], nodes: Callable[[int], list[TaskNode]]) -> None:
        self.all: tuple[WaveSlice, ...] = plan.state(TaskWavesState).slices
        self.task = [_index(slice_.task, tasks) for slice_ in self.all]
        self.routes: list[SliceRoute] = []
        self.nodes = [nodes(k) for k in range(len(tasks))]
        ends: dict[tuple[int, str], int] = {}
        for number, (slice_, k) in enumerate(zip(self.all, self.task, strict=True)):
            node = next((node for node in self.nodes[k] if node.name == slice_.node), None)
            before = ends.get((k, slice_.node))
            at = 0 if before is None else self.all[before].last
            if node is None or slice_.first != at or not at < slice_.last <= node.operators or not slice_.ranks:
                raise _nonsense(
                    f"{slice_.node} of {slice_.task} runs operators {slice_.first} to {slice_.last} after {at}"
                )
            if before is not None:
                self.routes.append(SliceRoute(before, number, 0))
            for place, need in enumerate(node.needs if before is None else ()):
                source = ends.get((k, need))
                if source is None or self.all[source].last != self._operators(k, need):
                    raise _nonsense(f"{slice_.node} of {slice_.task} runs before {need}")
                self.routes.append(SliceRoute(source, number, place))
            ends[k, slice_.node] = number
        for k, task in enumerate(tasks):
            for node in self.nodes[k]:
                last = ends.get((k, node.name))
                if last is None or self.all[last].last != node.operators:
                    raise _nonsense(f"nobody runs the last operators of {node.name} of {task}")
        self.into = [[route for route in self.routes if route.target == number] for number in range(len(self.all))]
        self.out = [[route for route in self.routes if route.source == number] for number in range(len(self.all))]

    def _operators(self, task: int, name: str) -> int:
        return next(node.operators for node in self.nodes[task] if node.name == name)

    def parts(self, route: SliceRoute, samples: int) -> Iterator[tuple[int, int, int, int]]:
        """(sender, receiver, first, last) of the samples that cross a route, or stay where sender is receiver."""
        return crossings(samples, self.all[route.source].ranks, self.all[route.target].ranks)

    def holders(self, owners: Mapping[str, tuple[str, int]]) -> dict[str, tuple[int, ...]]:
        """Of each parameter, the ranks that hold it: those whose slices use it, of any task."""
        users: dict[tuple[str, int], set[int]] = {}
        for slice_ in self.all:
            node = f"{HEAD}.{slice_.task}" if slice_.node == HEAD else slice_.node
            for operator in range(slice_.first, slice_.last):
                users.setdefault((node, operator), set()).update(slice_.ranks)
        return {name: tuple(sorted(users[place])) for name, place in owners.items()}


def _index(task: str, tasks: Sequence[str]) -> int:
    if task not in tasks:
        raise _nonsense(f"it has a task {task!r}, the recipe has {', '.join(tasks)}")
    return list(tasks).index(task)


def _nonsense(why: str) -> UserError:
    return UserError(
        f"The waves of plan.json cannot be run: {why}.", do="delete plan.json; the run is then planned again"
    )


@dataclass(frozen=True)
class WavePasses:
    """How passes run: as those of `train.whole_model.WholeSchedule`. `settle` returns when parameters
    are up to
    date; `nested`: micro-batches of each task."""

    nominal_weight: float
    accumulate: Accumulate
    context: Callable[[], AbstractContextManager[Any]]
    settle: Callable[[], None]
    shares: tuple[float, ...] = (1.0,)
    loss_scale: LossScale | None = None
    nested: int = 1


@dataclass
class _WaveStep:
    """The slices of this rank that have run forward. Has state: their inputs and outputs, and what is on its way here,
    (room, waits) by tag and sender."""

    taken: dict[int, list[Tensor]] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    coming: dict[tuple[int, int], tuple[Tensor, list[Any]]] = field(default_factory=dict)


class WaveSchedule:
    """See `Schedule`. Has state: the forms of messages."""

    def __init__(
        self, rank: int, model: nn.Module, slices: Slices, messages: StageMessages, passes: WavePasses
    ) -> None:
        self.rank, self.slices, self.messages, self.passes = rank, slices, messages, passes
        self.graph = cast("MultitaskModel", model)
        self.local_slices = [number for number, slice_ in enumerate(slices.all) if rank in slice_.ranks]
        model.forward = self._evaluated

    def run(self, model: nn.Module, batches: Sequence[Any], loss: Loss) -> Outcome:
        """See `Schedule.run`. A task without a batch is absent from the step. Each rank's outcome is of the samples
        whose losses it has computed."""
        self.passes.settle()
        losses: list[tuple[int, Tensor, Tensor]] = []
        under_way: deque[tuple[_WaveStep, TaskFields]] = deque()
        for fields in self._micro_batches({batch.task: batch.batch for batch in batches}):
            under_way.append((self._forwards(fields, losses), fields))
            if len(under_way) == NESTED_IN_FLIGHT:
                self._backwards(*under_way.popleft())
        while under_way:
            self._backwards(*under_way.popleft())
        with self.passes.accumulate(True):
            self.messages.finish()
        tasks = [task for task, _, _ in losses]
        return outcome([loss for _, loss, _ in losses], [weight for _, _, weight in losses], tasks, self.passes.shares)

    def _micro_batches(self, whole: TaskFields) -> Iterator[TaskFields]:
        """Of each task a part of its samples; of one whose head needs all of them, all in the first."""
        for number in range(self.passes.nested):
            micro_batch = {}
            for task, fields in whole.items():
                undivided = any(node.whole for node in self.slices.nodes[task])
                samples = _samples(fields)
                low, high = rows(samples, self.passes.nested, number) if not undivided else (0, samples * (number == 0))
                if low < high:
                    micro_batch[task] = {name: value[low:high] for name, value in fields.items()}
            yield micro_batch

    def _forwards(self, fields: TaskFields, losses: list[tuple[int, Tensor, Tensor]]) -> _WaveStep:
        """Adds (task, loss, weight) of the heads that are here."""
        step = _WaveStep()
        self._expect_inputs(step, fields)
        for number in self.local_slices:
            task = self.slices.task[number]
            if task in fields:
                self._forward(step, number, fields[task])
                if self.slices.all[number].node == HEAD and number in step.made:
                    value, weight = step.made[number]["loss"]
                    losses.append((task, value.detach().double(), weight.detach().double()))
        return step

    def _backwards(self, step: _WaveStep, fields: TaskFields) -> None:
        for number in reversed(self.local_slices):
            if self.slices.task[number] in fields:
                self._backward(step, number, fields[self.slices.task[number]])

    def apart(self, accumulate: Accumulate) -> WaveSchedule:
        copied = copy.copy(self)
        copied.passes = replace(self.passes, accumulate=accumulate)
        return copied

    def validation(self) -> AbstractContextManager[None]:
        """See `Schedule.validation`: each rank has the figures of its samples, which are summed."""
        return nullcontext()

    def _evaluated(self, task: int, fields: Fields) -> Any:
        """The model's forward, outside of steps: figures of the samples whose head is here; of none, nothing."""
        step = _WaveStep()
        figures = {}
        self._expect_inputs(step, {task: fields})
        for number in self.local_slices:
            if self.slices.task[number] == task:
                self._forward(step, number, fields)
                if self.slices.all[number].node == HEAD:
                    figures = step.made.get(number, {})
        self.messages.finish()
        return figures

    # --- one slice ---------------------------------------------------------------------------------------------------

    def _rows(self, number: int, samples: int) -> tuple[int, int]:
        ranks = self.slices.all[number].ranks
        return rows(samples, len(ranks), ranks.index(self.rank))

    def _arriving(self, number: int, samples: int) -> Iterator[tuple[SliceRoute, int, int, int]]:
        """(route, sender, first, last) of the inputs of a slice that come from other ranks."""
        for route in self.slices.into[number]:
            for sender, receiver, first, last in self.slices.parts(route, samples):
                if receiver == self.rank != sender:
                    yield route, sender, first, last

    def _expect_inputs(self, step: _WaveStep, fields: TaskFields) -> None:
        """Begins to receive what other ranks will send: a message crosses the link only once somebody wants it, and
        this rank is at work until then."""
        for number in self.local_slices:
            if (task := self.slices.task[number]) in fields:
                key = shapes_of(dict(fields[task]))
                for route, sender, first, last in self._arriving(number, _samples(fields[task])):
                    tag = self._tag(route)
                    form = self.messages.known(sender, tag, (first, last, key))
                    if form is not None:
                        self._expect(step, self.messages.rooms(form)[0], sender, tag)

    def _expect(self, step: _WaveStep, room: Tensor, peer: int, tag: int) -> None:
        step.coming[tag, peer] = room, self.messages.expect([room], peer, tag)

    def _received(self, step: _WaveStep, peer: int, tag: int) -> Tensor:
        """What `_expect` began to receive."""
        room, works = step.coming.pop((tag, peer))
        self.messages.wait(works)
        return room

    def _inputs(self, step: _WaveStep, number: int, fields: Fields) -> list[Tensor]:
        """What a slice takes: of each route its samples, from here and from others."""
        samples = _samples(fields)
        key = shapes_of(dict(fields))
        inputs = []
        for route in self.slices.into[number]:
            pieces = []
            tag = self._tag(route)
            for sender, receiver, first, last in self.slices.parts(route, samples):
                if receiver != self.rank:
                    continue
                if sender == self.rank:
                    begin, _ = self._rows(route.source, samples)
                    pieces.append(step.made[route.source].detach()[first - begin : last - begin])
                    continue
                if (tag, sender) not in step.coming:
                    form = self.messages.form(sender, tag, (first, last, key))
                    self._expect(step, self.messages.rooms(form)[0], sender, tag)
                pieces.append(self._received(step, sender, tag))
            if pieces:
                whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                inputs.append(whole.requires_grad_(torch.is_grad_enabled()))
        return inputs

    def _forward(self, step: _WaveStep, number: int, fields: Fields) -> None:
        slice_ = self.slices.all[number]
        samples = _samples(fields)
        low, high = self._rows(number, samples)
        inputs = self._inputs(step, number, fields)
        if low == high:
            return
        part = {name: value[low:high] for name, value in fields.items()}
        with self.passes.context():
            operators = (slice_.first, slice_.last)
            made: Any = self.graph.compute(self.slices.task[number], slice_.node, operators, inputs, part)
        step.taken[number] = inputs
        step.made[number] = made
        for route in self.slices.out[number]:
            tag = self._tag(route)
            key = shapes_of(dict(fields))
            for sender, receiver, first, last in self.slices.parts(route, samples):
                if sender == self.rank != receiver:
                    piece = made.detach()[first - low : last - low]
                    self.messages.announce(MessageForm.of(piece, slice_.node), receiver, tag, (first, last, key))
                    self.messages.send([piece], receiver, tag)
                    if self.messages.early and torch.is_grad_enabled():
                        self._expect(step, torch.empty_like(piece), receiver, tag + 1)

    def _tag(self, route: SliceRoute) -> int:
        """Of activations; their gradients have the next one."""
        return 2 * self.slices.routes.index(route)

    def _backward(self, step: _WaveStep, number: int, fields: Fields) -> None:
        if number not in step.made:
            return
        samples = _samples(fields)
        task = self.slices.task[number]
        made = step.made.pop(number)
        if self.slices.all[number].node == HEAD:
            value, _ = made["loss"]
            root = value / divisor(self.passes.nominal_weight, self.passes.shares[task], self.passes.loss_scale)
            gradient = None
        else:
            root = made
            gradient = self._gradient(step, number, made, samples)
        with self.passes.accumulate(False):
            torch.autograd.backward(root, gradient)
        low, _ = self._rows(number, samples)
        for route, sender, first, last in self._arriving(number, samples):
            leaf = step.taken[number][route.place]
            back = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            self.messages.send([back[first - low : last - low]], sender, self._tag(route) + 1)

    def _gradient(self, step: _WaveStep, number: int, made: Tensor, samples: int) -> Tensor:
        """Of what a slice gave: the sum over those who took it, in the order of the plan."""
        of_made, (low, _) = torch.zeros_like(made), self._rows(number, samples)
        for route in self.slices.out[number]:
            for sender, receiver, first, last in self.slices.parts(route, samples):
                if sender != self.rank:
                    continue
                if receiver == self.rank:
                    begin, _ = self._rows(route.target, samples)
                    leaf = step.taken[route.target][route.place]
                    if leaf.grad is not None:
                        of_made[first - low : last - low] += leaf.grad[first - begin : last - begin]
                else:
                    tag = self._tag(route) + 1
                    if (tag, receiver) not in step.coming:
                        self._expect(step, torch.empty_like(made[first - low : last - low]), receiver, tag)
                    of_made[first - low : last - low] += self._received(step, receiver, tag)
        return of_made


def _samples(fields: Fields) -> int:
    return len(next(iter(fields.values())))


# --- as mechanisms -------------------------------------------------------------------------------------------------


def _slices(context: Build) -> Slices:
    graph = cast("MultitaskModel", context.model)
    return Slices(context.plan, list(context.workload.tasks()), graph.nodes)


class OwnTowers(Mechanism):
    """A rank keeps the parts of the towers that its slices use."""

    claim = TOWERS

    def wrap(self, context: Build) -> None:
        """Frees all others. Raises UserError where the plan's waves leave a part to nobody."""
        model = context.model
        mesh = context.mesh
        assert model is not None
        assert mesh.replica is not None, "waves have several ranks"
        graph = cast("MultitaskModel", model)
        context.cut = context.cut or ModelCut(mesh.replica)
        holders = _slices(context).holders(graph.owners())
        ranks = {rank for some in holders.values() for rank in some}
        if idle := [rank for rank in range(len(context.plan.ranks)) if rank not in ranks]:
            # An optimizer needs something to hold: the smallest parameter, of which these never have a gradient.
            least = min(model.named_parameters(), key=lambda pair: (pair[1].numel(), pair[0]))[0]
            holders[least] = tuple(sorted({*holders[least], *idle}))
        own_names = {name for name, ranks in holders.items() if mesh.rank in ranks}
        context.cut.peers = {name: holders[name] for name in own_names}
        parameters = dict(model.named_parameters())
        free(model, {id(parameters[name]) for name in own_names}, set(map(id, parameters.values())))


class Waves(Mechanism):
    """The ranks run their slices, wave after wave."""

    claim = WAVES
    record = "spindle"

    def wrap(self, context: Build) -> None:
        """Makes the schedule."""
        sharding = context.sharding
        mesh = context.mesh
        model = context.model
        assert sharding is not None
        assert model is not None
        world, local_ranks = (dist.get_process_group_ranks(group) for group in (mesh.channel, mesh.replica))
        places = {rank: local_ranks.index(world[rank]) for rank in mesh.mesh.trainers}
        passes = WavePasses(
            context.workload.nominal_weight,
            sharding.accumulate,
            context.forward,
            sharding.settle,
            tuple(context.workload.tasks().values()),
            context.loss_scale,
            context.plan.state(TaskWavesState).nested,
        )
        slices = _slices(context)
        messages = StageMessages(mesh.replica, places, context.device)
        context.stalled = lambda: messages.waited
        context.schedule = WaveSchedule(mesh.rank, model, slices, messages, passes)
        self.state(context, {})
        mesh.number_groups_alike()

    def state(self, context: Build, parts: StatefulParts) -> StatefulParts:
        """The parts with the names of the whole model."""
        return {name: AllNames(part, context.mesh.replica) for name, part in parts.items()}


def choose_towers(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the plan has waves."""
    return OwnTowers()


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the plan has waves."""
    return Waves()
