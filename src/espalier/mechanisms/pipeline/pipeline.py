"""Pipeline parallelism: each rank holds some layers, and runs its action list over the micro-batches of a step.

One executor for every schedule (`schedules`, or lists written by hand). The workload's loss is called on every stage:
the model's forward runs the modules that are here; on all stages but the last, the loss is left at that point.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from espalier.comm.base import Traffic
from espalier.mechanisms.pipeline import split_backward
from espalier.optim.loss_scale import LossScale
from espalier.parallel.action_list import Action, ActionKind, ActionLists, Pipeline, check
from espalier.parallel.model_stages import Borrowed, ModelStages
from espalier.parallel.schedule import Accumulate, Loss
from espalier.parallel.stage_messages import MessageForm, StageMessages, shapes_of
from espalier.parallel.workload import Outcome, Tagged
from espalier.recipe.errors import UserError
from espalier.train.whole_model import divisor, outcome

_FORWARD, _BACKWARD, _COPY, _OUTPUT = range(4)
"""Kinds of messages to one stage: tags are `4 * stage` and one of them."""


class _Handed(BaseException):
    """Leaves a loss where the model's forward has run what this rank holds."""


@dataclass(frozen=True)
class PipelinePasses:
    """How forward and backward passes run.

    Attributes:
        nominal_weight, accumulate, context, shares, loss_scale: see `train.whole_model.WholeSchedule`.
        alone: surrounds a backward pass that gives parameters no gradient.
        weights: puts off gradients of parameters; None: the schedule does not.
    """

    nominal_weight: float
    accumulate: Accumulate
    context: Callable[[], AbstractContextManager[Any]]
    alone: Callable[[], AbstractContextManager[None]]
    weights: split_backward.WeightGradients | None = None
    shares: tuple[float, ...] = (1.0,)
    loss_scale: LossScale | None = None


class PipelineSchedule:
    """See `Schedule`. Has state: the action lists of this rank by number of micro-batches, and the step at work.

    Args:
        rank: this one, among those of the pipeline.
        stages: what it holds of the model.
        messages: the way to the others.
        lists: gives the action lists of a pipeline; they are checked before their first step.
        passes: how passes run.
    """

    def __init__(
        self,
        rank: int,
        stages: ModelStages,
        messages: StageMessages,
        lists: Callable[[Pipeline], ActionLists],
        passes: PipelinePasses,
    ) -> None:
        self.rank, self.stages, self.messages, self.passes = rank, stages, messages, passes
        self.boundary = _Boundary(rank, stages, messages)
        self._lists = lists
        self._known: dict[int, Sequence[Action]] = {}
        stages.model.register_forward_hook(self.boundary.left)  # the last of all hooks
        stages.call = self.boundary.called

    def actions(self, micro_batches: int) -> Sequence[Action]:
        """The list of this rank for so many micro-batches. Raises UserError where the lists cannot be run."""
        if micro_batches not in self._known:
            pipeline = Pipeline(self.stages.pipeline.stages, micro_batches)
            lists = self._lists(pipeline)
            check([pipeline], lists)
            self._known[micro_batches] = tuple(lists[self.rank])
        return self._known[micro_batches]

    def run(self, model: nn.Module, batches: Sequence[Any], loss: Loss) -> Outcome:
        """See `Schedule.run`. Stages before the last give an outcome of 0."""
        step = _PipelineStep(self.boundary, self.passes, batches, loss)
        self.boundary.step = step
        self.boundary.copied.clear()
        try:
            step.run(self.actions(len(batches)))
        finally:
            self.boundary.step = None
            self.boundary.copied.clear()
        self.messages.finish()
        return outcome(step.losses, step.weights, [_task(batches[n]) for n in step.counted], self.passes.shares)

    def apart(self, accumulate: Accumulate) -> PipelineSchedule:
        copied = copy.copy(self)
        copied.passes = replace(self.passes, accumulate=accumulate)
        return copied

    @contextmanager
    def validation(self) -> Iterator[None]:
        """See `Schedule.validation`: outputs of the last stage stay there, other ranks get zeros."""
        self.boundary.shown = False
        try:
            yield
        finally:
            self.boundary.shown = True


def _task(batch: Any) -> int:
    return batch.task if isinstance(batch, Tagged) else 0


def _tensors(value: Any) -> list[Tensor]:
    """Of what a stage gives or takes."""
    return [] if value is None else list(value) if isinstance(value, tuple | list) else [value]


def _floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point()]


# --- a step --------------------------------------------------------------------------------------------------------


_Key = tuple[int, int]
"""Stage and micro-batch."""


@dataclass
class _PipelineStep:
    """One step on this rank. Has state: what is computed and not used up yet.

    Attributes:
        stage, x: the forward pass at work; output: what it gave.
        taken, made: of each forward pass that has no backward pass yet, its inputs and its outputs (or the loss).
        inputs: of forward passes to come; gradients: of the outputs, of backward passes to come.
        expected: receives that have begun early.
        back: gradients of inputs, to be sent; later: gradients of parameters, to be computed.
        shapes: of micro-batches, once they were asked for.
        losses, weights: of the micro-batches `counted`.
    """

    boundary: _Boundary
    passes: PipelinePasses
    batches: Sequence[Any]
    loss: Loss
    stage: int = -1
    x: Any = None
    output: Any = None
    taken: dict[_Key, list[Tensor]] = field(default_factory=dict)
    made: dict[_Key, Any] = field(default_factory=dict)
    inputs: dict[_Key, Any] = field(default_factory=dict)
    gradients: dict[_Key, list[Tensor]] = field(default_factory=dict)
    back: dict[_Key, list[Tensor]] = field(default_factory=dict)
    expected: dict[Action, list[Any]] = field(default_factory=dict)
    later: dict[_Key, split_backward.Later] = field(default_factory=dict)
    shapes: dict[int, Hashable] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)

    def run(self, actions: Sequence[Action]) -> None:
        """All of them in turn."""
        numbered = list(enumerate(actions))
        through = {
            action.stage: at
            for at, action in numbered
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        }
        complete = {
            action.stage: at
            for at, action in numbered
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        }
        unsent = Counter((action.stage, action.micro_batch) for action in actions if action.kind is ActionKind.SEND_B)
        for at, action in numbered:
            stage = action.stage
            kind = action.kind
            if not action.computes:
                self._message(action, unsent)
                continue
            self._expect(islice(actions, at + 1, None))
            if kind is ActionKind.FORWARD:
                self._forward((stage, action.micro_batch))
                continue
            if complete[stage] == at:
                self.boundary.take_back(stage)
            self._backward(action, last=at == max(complete.values()))
            if through[stage] == at:
                self.boundary.give_back(stage)

    def _message(self, action: Action, unsent: Counter[_Key]) -> None:
        """Sends or receives. `unsent`: of each gradient that is sent, to how many ranks it still goes."""
        stage, kind, number, peer = action
        key = (stage, number)
        boundary = self.boundary
        if action in self.expected:
            boundary.messages.wait(self.expected.pop(action))
        elif kind is ActionKind.RECV_F:
            self.inputs[key] = boundary.receive(stage, peer, self._shapes(number))
        elif kind is ActionKind.SEND_F:
            boundary.send(stage, peer, self.made[key], self._shapes(number))
        elif kind is ActionKind.RECV_B:
            boundary.messages.receive(self._rooms(key), peer, 4 * stage + _BACKWARD)
        else:
            unsent[key] -= 1
            gradients = self.back[key] if unsent[key] else self.back.pop(key)
            boundary.messages.send(gradients, peer, 4 * (stage - 1) + _BACKWARD)

    def _shapes(self, number: int) -> Hashable:
        """Of a micro-batch."""
        if number not in self.shapes:
            self.shapes[number] = shapes_of(self.batches[number])
        return self.shapes[number]

    def _rooms(self, key: _Key) -> list[Tensor]:
        """Memory for the gradients of what a forward pass gave."""
        self.gradients[key] = [torch.empty_like(tensor) for tensor in _floating(_tensors(self.made[key]))]
        return self.gradients[key]

    def _expect(self, following: Iterable[Action]) -> None:
        """Begins to receive what the next pass needs, so that it arrives while this one computes."""
        for action in following:
            stage, kind, number, peer = action
            key = (stage, number)
            messages = self.boundary.messages
            if action.computes:
                return
            if kind is ActionKind.RECV_F:
                form = messages.known(peer, 4 * stage + _FORWARD, self._shapes(number))
                if form is not None:
                    rooms = messages.rooms(form)
                    self.inputs[key] = form.packed(rooms)
                    self.expected[action] = messages.expect(rooms, peer, 4 * stage + _FORWARD)
            elif kind is ActionKind.RECV_B and key in self.made and messages.early:
                self.expected[action] = messages.expect(self._rooms(key), peer, 4 * stage + _BACKWARD)

    def called(self, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """The model's forward, called by the loss."""
        if self.output is not None:
            raise UserError(
                "The loss calls the model more than once.",
                why="a pipeline stage computes a micro-batch in one forward pass",
                do="one call of the model for each micro-batch, or plan.pin.pp=1",
            )
        stages = self.boundary.stages
        self.output = stages.compute(self.stage, self.x, stages.given(inputs, options), inputs, options)
        return self.output

    def _forward(self, key: _Key) -> None:
        (stage, number), boundary = key, self.boundary
        x = self.inputs.pop(key, None)
        leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in _tensors(x)]
        self.stage = stage
        self.output = None
        self.x = None if x is None else tuple(leaves) if isinstance(x, tuple) else leaves[0]
        boundary.borrow(stage)
        try:
            with self.passes.context():
                value, weight = self.loss(boundary.stages.model, self.batches[number])
        except _Handed:
            made = self.output
        else:
            if stage != boundary.stages.last or self.output is None:
                raise UserError("The loss does not call the model.", do="call the model once for each micro-batch")
            share = self.passes.shares[_task(self.batches[number])]
            made = value / divisor(self.passes.nominal_weight, share, self.passes.loss_scale)
            self.losses.append(value.detach().double())
            self.weights.append(weight.detach().double())
            self.counted.append(number)
        boundary.lend(stage)
        self.taken[key] = _floating(leaves)
        self.made[key] = made
        if stage + 1 in boundary.stages.local_stages:
            self.inputs[stage + 1, number] = made
        self.output = None

    def _backward(self, action: Action, last: bool) -> None:
        stage, kind, number, _ = action
        key = stage, number
        if kind is ActionKind.BACKWARD_WEIGHT:
            with self.passes.accumulate(last):
                split_backward.accumulate(self.later.pop(key))
            return
        outputs = _floating(_tensors(self.made.pop(key)))
        leaves = self.taken.pop(key)
        given = self.gradients.pop(key, [None] * len(outputs))
        pairs = [(output, gradient) for output, gradient in zip(outputs, given, strict=True) if output.requires_grad]
        roots = [output for output, _ in pairs]
        gradients = [gradient for _, gradient in pairs]
        if kind is ActionKind.BACKWARD_INPUT:
            assert self.passes.weights is not None, "its schedule puts off gradients of parameters"
            with self.passes.alone():
                self.later[key] = self.passes.weights.inputs(roots, gradients, [*leaves, *self.boundary.copies(stage)])
        else:
            with self.passes.accumulate(last):
                if roots:
                    torch.autograd.backward(roots, gradients)
        of_leaves = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        if stage - 1 in self.boundary.stages.local_stages:
            self.gradients[stage - 1, number] = of_leaves
        elif stage:
            self.back[key] = of_leaves


# --- between stages ------------------------------------------------------------------------------------------------


class _Boundary:
    """What crosses from stage to stage. Has state.

    Attributes:
        step: the step at work; None: forward passes are somebody's own, of an evaluation or a sample.
        copied: the stages whose borrowed parameters were sent (`owner`) or received (`user`) since the last step.
        shown: whether forward passes outside of steps give every rank their output.
    """

    def __init__(self, rank: int, stages: ModelStages, messages: StageMessages) -> None:
        self.rank = rank
        self.stages = stages
        self.messages = messages
        self.step: _PipelineStep | None = None
        self.copied: set[tuple[str, int]] = set()
        self.shown = True

    def left(self, *_: Any) -> None:
        """Hook after the model's forward."""
        if self.step is not None and self.step.stage != self.stages.last:
            raise _Handed

    def called(self, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """The model's forward. Outside of a step all ranks of the pipeline call it with the same inputs."""
        if self.step is not None:
            return self.step.called(inputs, options)
        key = shapes_of((inputs, options))
        x = None
        pipeline = self.stages.pipeline
        given = self.stages.given(inputs, options)
        for stage in self.stages.local_stages:
            if stage and stage - 1 not in self.stages.local_stages:
                x = self.receive(stage, pipeline.source(stage, stage - 1, self.rank), key)
            self.borrow(stage)
            x = self.stages.compute(stage, x, given, inputs, options)
            self.lend(stage)
            for peer in pipeline.targets(stage, stage + 1, self.rank) if stage < self.stages.last else ():
                self.send(stage, peer, x, key)
        output = self._output(x, key)
        self.messages.finish()
        return output

    def receive(self, stage: int, peer: int, key: Any, kind: int = _FORWARD) -> Any:
        """What `stage` takes, for a micro-batch whose shapes are `key`."""
        form = self.messages.form(peer, 4 * stage + kind, key)
        rooms = self.messages.rooms(form)
        self.messages.receive(rooms, peer, 4 * stage + kind)
        return form.packed(rooms)

    def send(self, stage: int, peer: int, value: Any, key: Any) -> None:
        """What `stage` gives, to a rank of the next one."""
        tag = 4 * (stage + 1) + _FORWARD
        self.messages.announce(MessageForm.of(value, f"Stage {stage} of the model"), peer, tag, key)
        self.messages.send(_tensors(value), peer, tag)

    def _output(self, output: Any, key: Any) -> Any:
        """The output of the last stage: on every rank where it is `shown`, else zeros of its shapes on the others."""
        pipeline = self.stages.pipeline
        last = self.stages.last
        tag = 4 * last + _OUTPUT
        if last not in self.stages.local_stages:
            peer = pipeline.source(self.stages.local_stages[0], last, self.rank)
            if self.shown:
                return self.receive(last, peer, key, _OUTPUT)
            form = self.messages.form(peer, tag, key)
            return form.packed([torch.zeros((), dtype=dtype).expand(shape) for dtype, shape in form.tensors])
        for peer in pipeline.ranks:
            stages = pipeline.stages_of(peer)
            if last not in stages and pipeline.source(stages[0], last, peer) == self.rank:
                self.messages.announce(MessageForm.of(output, "The model"), peer, tag, key)
                if self.shown:
                    self.messages.send(_tensors(output), peer, tag)
        return output

    # --- borrowed parameters -----------------------------------------------------------------------------------------

    def lend(self, stage: int) -> None:
        """Sends what others borrow of a stage, after its first forward pass since a step: it is all there then."""
        for parameter in self._due("owner", stage):
            for peer in self._borrowers(parameter):
                self.messages.send(
                    [parameter.value.to(parameter.dtype)], peer, 4 * parameter.user + _COPY, Traffic.PARAMETERS
                )

    def borrow(self, stage: int) -> None:
        """Takes what a stage borrows, before its first forward pass since a step."""
        for parameter in self._due("user", stage):
            self.messages.receive(
                [parameter.value.data], self._lender(parameter), 4 * parameter.user + _COPY, Traffic.PARAMETERS
            )

    def give_back(self, stage: int) -> None:
        """Sends the gradients of what a stage has borrowed, after its last backward pass of a step."""
        for parameter in self.stages.borrowed:
            if parameter.user == stage and parameter.value.requires_grad:
                gradient = torch.zeros_like(parameter.value) if parameter.value.grad is None else parameter.value.grad
                self.messages.send([gradient], self._lender(parameter), 4 * parameter.user + _COPY, Traffic.GRADIENTS)
                parameter.value.grad = None

    def take_back(self, stage: int) -> None:
        """Adds gradients from those who borrow of a stage to its own, before its last backward pass of a step."""
        for parameter in self.stages.borrowed:
            for peer in (
                self._borrowers(parameter) if parameter.owner == stage and parameter.value.requires_grad else ()
            ):
                room = torch.empty(parameter.value.shape, dtype=parameter.dtype, device=parameter.value.device)
                self.messages.receive([room], peer, 4 * parameter.user + _COPY, Traffic.GRADIENTS)
                gradient = parameter.value.grad
                room = room.to(parameter.value.dtype)
                parameter.value.grad = room if gradient is None else gradient + room

    def _due(self, side: str, stage: int) -> list[Borrowed]:
        if (side, stage) in self.copied:
            return []
        self.copied.add((side, stage))
        return [parameter for parameter in self.stages.borrowed if getattr(parameter, side) == stage]

    def _lender(self, parameter: Borrowed) -> int:
        return self.stages.pipeline.source(parameter.user, parameter.owner, self.rank)

    def _borrowers(self, parameter: Borrowed) -> list[int]:
        return self.stages.pipeline.targets(parameter.owner, parameter.user, self.rank)

    def copies(self, stage: int) -> list[Tensor]:
        """What a stage borrows and gives gradients of."""
        return [
            parameter.value
            for parameter in self.stages.borrowed
            if parameter.user == stage and parameter.value.requires_grad
        ]
