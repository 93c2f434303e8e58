"""Vertical schedule: all micro-batches of a layer before the next layer, where a window of layers is here at a time.

After GreedySnake (arXiv 2512.17570): a layer's parameters are read once in the forward pass and once in the backward
pass of a step, however many micro-batches the step has. Between its passes a piece keeps its inputs only and computes
its activations again in backward. A piece whose backward needs no floating-point tensor of its forward pass (a table)
keeps its graph instead, and its parameters are not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from espalier.kernels import accelerator
from espalier.parallel.schedule import Loss, TensorStore, Window
from espalier.parallel.workload import Outcome, Pieces, Tagged
from espalier.plan.compose import Claim
from espalier.recipe.errors import UserError
from espalier.train.mechanism import Build, Mechanism
from espalier.train.whole_model import WholeSchedule, divisor, outcome

if TYPE_CHECKING:
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe

CLAIM = Claim(
    "vertical", question="stages", needs={"gradients are summed", "a window of layers"}, after={"activations"}
)


class _Captured(BaseException):
    """Leaves a loss where it calls the model."""


_Call = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class _Forward:
    """The model's forward. Has state: what it does now."""

    def __init__(self, call: _Call) -> None:
        self.call = call

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.call(inputs, options)


@dataclass
class _MicroBatchPass:
    """One micro-batch on its way through the pieces. Has state.

    Attributes:
        inputs, options: what the model's forward was given; given: what every piece takes beside `x`.
        x: what the piece before gave; gradient: of what the piece at work in backward gave.
        saved: of each piece, its input (or where it waits) and the generator's state before it, or the graph of a piece
            that keeps it.
    """

    inputs: tuple[Any, ...]
    options: Mapping[str, Any]
    given: Any
    x: Any = None
    gradient: list[Tensor | None] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)


class Vertical(WholeSchedule):
    """See `Schedule`. Has state: what the model's forward does. `cover` makes it ready for a model."""

    window: Window
    pieces: Pieces
    store: TensorStore | None

    def cover(self, model: nn.Module, pieces: Pieces, window: Window, store: TensorStore | None = None) -> Vertical:
        """Runs `model`, also its forward passes without gradients, through `window`; inputs wait in `store`."""
        self.window = window
        self.pieces = pieces
        self.store = store
        self._keeps: dict[int, bool] = {}
        self._shown = False
        self._model = _Forward(self._forward)
        model.forward = self._model
        return self

    def apart(self, accumulate: Any) -> Vertical:
        """See `Schedule.apart`: gradients are not sent. Of each parameter one number is left in its `.grad`."""
        copied = type(self)(self.nominal_weight, accumulate, self.context, self.shares, self.loss_scale)
        copied.__dict__.update(self.__dict__, accumulate=accumulate, _shown=True)
        return copied

    # --- a step ------------------------------------------------------------------------------------------------------

    def run(self, model: nn.Module, batches: Sequence[Any], loss: Loss) -> Outcome:
        """See `Schedule.run`: the gradient of each layer is handed to the window as soon as it is complete."""
        count = len(self.pieces.modules)
        self.window.begin(self.order())
        passes = [self._captured(model, batch, loss) for batch in batches]
        with torch.no_grad():
            for piece in range(count - 1):
                with self._here(piece):
                    for pass_ in passes:
                        self._advance(piece, pass_)
        losses, weights = self._through_head(model, batches, loss, passes)
        for piece in reversed(range(count - 1)):
            if self._keeps.get(piece):
                self._backward(piece, passes)
            else:
                with self._here(piece):
                    self._backward(piece, passes)
            self._complete(piece)
        tasks = [batch.task if isinstance(batch, Tagged) else 0 for batch in batches]
        self.window.usual = self.order()
        return outcome(losses, weights, tasks, self.shares)

    def order(self, training: bool = True) -> list[int]:
        """The layers in the order in which a step needs them."""
        uses = self.window.uses
        last = len(self.pieces.modules) - 1
        forward = [layer for layers in uses for layer in layers]
        if not training:
            return forward
        back = [layer for piece in reversed(range(last)) if not self._keeps.get(piece) for layer in uses[piece]]
        return forward + back

    def _captured(self, model: nn.Module, batch: Any, loss: Loss) -> _MicroBatchPass:
        """What the loss gives the model."""
        calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

        def capture(inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
            calls.append((inputs, options))
            raise _Captured

        with self._calls(capture):
            try:
                loss(model, batch)
            except _Captured:
                pass
            else:
                raise UserError("The loss does not call the model.", do="call the model once for each micro-batch")
        inputs, options = calls[0]
        return _MicroBatchPass(inputs, options, self.pieces.given(*inputs, **options))

    def _advance(self, piece: int, pass_: _MicroBatchPass) -> None:
        """A piece's forward pass; what backward needs of it is kept."""
        state = _generators()
        taken = pass_.x
        if piece not in self._keeps or self._keeps[piece]:
            with torch.enable_grad(), _saving() as saved, self.context():
                made = self._computed(piece, pass_)
            if self._keeps.setdefault(piece, not any(saved)):
                pass_.saved.append(("graph", taken, made))
                pass_.x = _leaves(made)
                return
            made = tree_map_only(Tensor, Tensor.detach, made)
        else:
            with self.context():
                made = self._computed(piece, pass_)
        drawn = None if all(map(torch.equal, state, _generators())) else state
        if self.store is not None and piece > 1:  # the table's graph has the first block's
            pass_.saved.append(("stored", tree_map(self.store.put, taken), drawn))
        else:
            pass_.saved.append(("input", taken, drawn))
        pass_.x = _leaves(made)

    def _computed(self, piece: int, pass_: _MicroBatchPass) -> Any:
        if piece == 0:
            return self.pieces.embed(*pass_.inputs, **pass_.options)
        return [*self.pieces.blocks, self.pieces.head][piece - 1](pass_.x, pass_.given)

    def _through_head(
        self, model: nn.Module, batches: Sequence[Any], loss: Loss, passes: Sequence[_MicroBatchPass]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Forward and backward of the last piece and the loss, one micro-batch after the other."""
        losses = []
        weights = []
        last = len(self.pieces.modules) - 1
        with self._here(last):
            for batch, pass_ in zip(batches, passes, strict=True):
                leaves = _floating(pass_.x)

                def head(inputs: Any, options: Any, pass_: _MicroBatchPass = pass_) -> Any:
                    return self._computed(last, pass_)

                with self._calls(head), self.context():
                    value, weight = loss(model, batch)
                share = self.shares[batch.task if isinstance(batch, Tagged) else 0]
                torch.autograd.backward(value / divisor(self.nominal_weight, share, self.loss_scale))
                losses.append(value.detach().double())
                weights.append(weight.detach().double())
                pass_.gradient = [leaf.grad for leaf in leaves]
                pass_.x = None
        self._complete(last)
        return losses, weights

    def _backward(self, piece: int, passes: Sequence[_MicroBatchPass]) -> None:
        for number, pass_ in enumerate(passes):
            kind, taken, rest = pass_.saved.pop()
            if kind == "stored":
                taken = self._brought(taken, (passes[number + 1 :] or passes)[0].saved[-1])
            leaves = _floating(taken)
            if kind == "graph":
                made = rest
            else:
                pass_.x = taken
                with _drawing(rest), self.context():
                    made = self._computed(piece, pass_)
                pass_.x = None
            pairs = [
                (output, gradient)
                for output, gradient in zip(_floating(made), pass_.gradient, strict=True)
                if gradient is not None and output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
            pass_.gradient = [leaf.grad for leaf in leaves]

    def _brought(self, stored: Any, following: tuple[str, Any, Any]) -> Any:
        """An input that has waited; `following` is read from now on, if it waits too."""
        assert self.store is not None
        kind, then, _ = following
        for saved in tree_leaves((stored, then if kind == "stored" else ())):
            self.store.begin(saved)
        return _leaves(tree_map(self.store.get, stored))

    def _complete(self, piece: int) -> None:
        """Sends the gradients that no piece before this one adds to."""
        for layer in self.window.uses[piece]:
            if not any(layer in layers for layers in self.window.uses[:piece]):
                if self._shown:
                    self.window.summarize(layer)
                else:
                    self.window.push(layer)

    @contextmanager
    def _here(self, piece: int) -> Iterator[None]:
        for layer in self.window.uses[piece]:
            self.window.need(layer)
        yield
        for layer in self.window.uses[piece]:
            self.window.release(layer)

    # --- forward passes without gradients ----------------------------------------------------------------------------

    def _forward(self, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        self.window.begin(self.order(training=False))
        pass_ = _MicroBatchPass(inputs, options, self.pieces.given(*inputs, **options))
        for piece in range(len(self.pieces.modules)):
            with self._here(piece):
                pass_.x = self._computed(piece, pass_)
        return pass_.x

    @contextmanager
    def _calls(self, call: _Call) -> Iterator[None]:
        before = self._model.call
        self._model.call = call
        try:
            yield
        finally:
            self._model.call = before


def _leaves(value: Any) -> Any:
    """What a piece gave, cut off from how it came about; gradients of its floating tensors are asked for."""
    return tree_map_only(Tensor, lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), value)


def _floating(value: Any) -> list[Tensor]:
    tensors = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, tuple | list) else []
    return [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point()]


@contextmanager
def _saving() -> Iterator[list[bool]]:
    """Gives a list that says of each tensor which autograd keeps inside whether it has floating-point numbers."""
    flags: list[bool] = []

    def pack(saved: Tensor) -> Tensor:
        flags.append(saved.is_floating_point())
        return saved.detach()  # an output that its own node keeps would keep the node, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield flags


def _generators() -> list[Tensor]:
    """States of the generators that layers draw from: the processor's, and the current GPU's where there is one."""
    return [torch.get_rng_state(), *([accelerator.generator_state()] if accelerator.begun() else [])]


def _set_generators(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        accelerator.set_generator_state(states[1])


@contextmanager
def _drawing(states: Sequence[Tensor] | None) -> Iterator[None]:
    """Random numbers as the forward pass drew them."""
    if states is None:
        yield
        return
    after = _generators()
    _set_generators(states)
    try:
        yield
    finally:
        _set_generators(after)


class VerticalModel(Mechanism):
    """Every rank computes all layers, of which it has a window."""

    claim = CLAIM

    def wrap(self, context: Build) -> None:
        """Makes the schedule."""
        assert context.sharding is not None
        assert context.model is not None
        assert context.window is not None
        pieces = context.workload.pieces(context.model)
        assert pieces is not None, "the window's layers were made of its pieces"
        shares = tuple(context.workload.tasks().values())
        made = Vertical(
            context.workload.nominal_weight, context.sharding.accumulate, context.forward, shares, context.loss_scale
        )
        context.schedule = made.cover(context.model, pieces, context.window, context.activations)


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where the model's layers are held by ranks of their own, or on disk."""
    offloaded = plan.offload.parameters in ("host", "disk")
    return VerticalModel() if offloaded or plan.optimizer_nodes else None
