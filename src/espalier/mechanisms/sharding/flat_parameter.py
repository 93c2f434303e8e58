"""Flat parameter: one flat unit on one rank, with its parameters, its gradients and the shard that its optimizer
updates.

Parameters become views of one buffer, so whole units travel without being packed. Flat order is each parameter's
row-major order, whatever its strides were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllreduceOptions

from espalier.checkpoint.tensor_slice import Slice
from espalier.comm.base import Traffic, traffic
from espalier.comm.c10d_arguments import residual_like
from espalier.mechanisms.sharding.async_collectives import Chain, Stage
from espalier.mechanisms.sharding.axis_groups import AxisGroups
from espalier.mechanisms.sharding.sharded_gradient import ShardedGradient
from espalier.optim.base import Owned
from espalier.parallel.model_cut import Holders
from espalier.plan.axes.flat_layout import Arranged
from espalier.plan.axes.placement import Span
from espalier.store.base import WeightStore


@dataclass(eq=False)
class ParameterSlot:
    """One parameter and its place in a unit. Has state.

    Attributes:
        number: among all trainable parameters of the model.
        view: where its gradient is collected; None between rounds where that is scattered.
        fresh: its gradient came in this round; used: in this step.
    """

    name: str
    parameter: nn.Parameter
    number: int
    shape: torch.Size = field(init=False)
    span: Span = field(init=False)
    view: Tensor | None = field(init=False, default=None)
    fresh: bool = field(init=False, default=False)
    used: bool = field(init=False, default=False)

    def take(self) -> None:
        """Moves a fresh gradient into the unit, while it is still in the processor's cache."""
        grad = self.parameter.grad
        if isinstance(grad, ShardedGradient):
            grad = grad.fresh
        if grad is not None and grad is not self.view:
            assert self.view is not None
            with torch.no_grad():
                self.view.copy_(grad)
        self.fresh = self.used = True


class MovedPiece(NamedTuple):
    """A piece of a parameter that this rank's optimizer moves, and where it lies in the unit."""

    slot: ParameterSlot
    owned: Owned
    span: Span


class FlatUnit:
    """Parameters of one buffer, of which a rank may hold a shard. Has state: the buffer, and what is under way.

    Args:
        slots: the parameters, changed in place: they become views of the unit's buffer.
        arranged: where each lies.
        mesh: the ranks it is spread over.
        low: dtype that the parameters are cast to; None: their own.

    Attributes:
        part: this rank's shard of the parameters; all of them where they are not sharded.
        full: all parameters; without storage while they are sharded and nobody needs them.
    """

    def __init__(
        self, slots: Sequence[ParameterSlot], arranged: Arranged, mesh: AxisGroups, low: torch.dtype | None = None
    ) -> None:
        self.slots = list(slots)
        self.mesh = mesh
        self.length = arranged.length
        for slot, offset in zip(self.slots, arranged.offsets, strict=True):
            slot.shape, slot.span = slot.parameter.shape, Span(offset, slot.parameter.numel())
        self.params, self.optimizer = (mesh.held(self.length, state) for state in ("params", "optimizer"))
        self.sharded = self.params.length < self.length
        first = self.slots[0].parameter
        whole = torch.zeros(self.length, dtype=first.dtype, device=first.device)
        for slot in self.slots:
            whole[_slice(slot.span)].copy_(slot.parameter.detach().reshape(-1))
        self.masters = None if low is None else whole[_slice(self.optimizer)].clone()
        self.full = whole if low is None else whole.to(low)
        self.part = self.full[_slice(self.params)].clone() if self.sharded else self.full
        self.gathered = True
        self.gathering: Chain | None = None
        self.refreshing: Chain | None = None

    def gather(self) -> list[Stage]:
        """The stages that bring all parameters here; call `attach` when they are through."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        self.full[_slice(self.params)].copy_(self.part)
        base = Span(0, self.length)
        return [stage(self.full, base) for stage in self.mesh.gather(self.length, "params")]

    def attach(self) -> None:
        """The parameters are all here and may be used."""
        self.gathered = True
        for slot in self.slots:
            slot.parameter.data = self.full[_slice(slot.span)].view(slot.shape)

    def release(self) -> None:
        """Gives their memory back. A parameter that is read without being gathered is not a number."""
        self.gathered = False
        self.gathering = None
        filler = torch.nan if self.full.is_floating_point() else 0
        nothing = torch.full((), filler, dtype=self.full.dtype, device=self.full.device)
        for slot in self.slots:
            slot.parameter.data = nothing.expand(slot.shape)
        self.full.untyped_storage().resize_(0)

    def refresh(self) -> list[Stage]:
        """The stages that bring what the optimizers have moved to everybody who holds it."""
        return []

    @property
    def local(self) -> Tensor:
        """[optimizer span] what this rank's optimizer moves."""
        return self.part[self.optimizer.within(self.params)] if self.masters is None else self.masters

    def assembled(self, local: Tensor) -> tuple[Tensor, list[Stage]]:
        """A buffer of the whole unit and the stages that fill it from every rank's `local` values [optimizer span]."""
        whole = local.new_empty(self.length)
        whole[_slice(self.optimizer)].copy_(local)
        base = Span(0, self.length)
        stages = self.mesh.gather(self.length, "optimizer", "grads", "params")
        return whole, [stage(whole, base) for stage in stages]


class FrozenUnit(FlatUnit):
    """Frozen parameters of a block and a dtype: gathered with the block, and never reduced. `device`: where they are
    computed with; they may come from the host's memory. `weights`: what keeps this rank's part there; None: it is on
    the device."""

    def __init__(
        self,
        slots: Sequence[ParameterSlot],
        arranged: Arranged,
        mesh: AxisGroups,
        device: torch.device,
        weights: WeightStore | None = None,
    ) -> None:
        super().__init__(slots, arranged, mesh)
        self.weights = weights
        self.sharded = True
        self.part = self.part.to(device) if weights is None else weights.keep(self.part)
        self.full = torch.empty_like(self.full, device=device)
        self.release()

    def gather(self) -> list[Stage]:
        if self.weights is None:
            return super().gather()
        self.full.untyped_storage().resize_(self.full.nbytes)
        self._arrived = self.weights.fetch(self.part, self.full[_slice(self.params)])
        base = Span(0, self.length)
        stages = (stage(self.full, base) for stage in self.mesh.gather(self.length, "params"))
        return [partial(_after_copies, self.weights, stage) for stage in stages]

    def attach(self) -> None:
        if self.weights is not None:
            self._arrived()
        super().attach()

    @property
    def local(self) -> Tensor:
        return super().local.to(self.full.device)

    def piece(self, slot: ParameterSlot) -> Slice:
        """This rank's part of a parameter, which the first of its replicas writes."""
        start = min(max(slot.span.start, self.params.start), slot.span.stop)
        stop = max(min(slot.span.stop, self.params.stop), start)
        replicas = self.mesh.placement.along("grads", "optimizer", "replicas")
        writes = all(axis.coordinate(self.mesh.rank) == 0 for axis in replicas)
        local = self.part[Span(start, stop - start).within(self.params)] if start < stop else self.part[:0]
        return Slice(local, slot.shape, start - slot.span.start, writes=writes and start < stop)


class FlatParameter(FlatUnit):
    """A unit of trainable parameters on this rank. Has state: the buffers, and what is under way.

    Args:
        slots, arranged, mesh: see `FlatUnit`.
        low: dtype of the parameters and gradients when the optimizer keeps masters in the parameters' own dtype.
        holders: other ranks that hold the same of a model that is cut; None: it is not.

    Attributes:
        moved: the pieces that this rank's optimizer moves.
        weight: what this rank's gradients count in the sum.
        missing: gradients still to come in this round.
        holding: stages of its exchange after which this takes no memory beside what is summed.
        residual: what lossy codecs have not sent yet of this rank's gradients; None where there are none.
            On their device, where a codec encodes them there.
    """

    def __init__(
        self,
        slots: Sequence[ParameterSlot],
        arranged: Arranged,
        mesh: AxisGroups,
        low: torch.dtype | None = None,
        holders: Holders | None = None,
    ) -> None:
        super().__init__(slots, arranged, mesh, low)
        self.holders, self.grads = holders, mesh.held(self.length, "grads")
        self.scattered = self.grads.length < self.length
        self.collected: Tensor | None = None
        self.summed = self.full.new_empty(self.grads.length) if self.scattered else self._collecting()
        self.residual = residual_like(self.full, mesh.rounding) if mesh.rounding else None
        self.moved = self._moved()
        self.missing = len(self.slots)
        self.rounds = self.holding = 0
        self.weight = 1.0
        self.attach()
        if self.sharded:
            self.release()

    # --- parameters --------------------------------------------------------------------------------------------------

    def refresh(self) -> list[Stage]:
        """The stages that bring what the optimizers have moved to everybody who holds it."""
        if self.masters is not None:
            self.part[self.optimizer.within(self.params)].copy_(self.masters)
        return [stage(self.part, self.params) for stage in self.mesh.gather(self.length, "optimizer", "grads")]

    @property
    def copies(self) -> float:
        """Ranks that hold the same of what this rank's optimizer moves."""
        ranks = self.mesh.placement.ranks / self.mesh.placement.factors.optimizer
        return ranks if self.holders is None else ranks * self.holders.copies

    @property
    def direct(self) -> bool:
        """The optimizer moves the parameters themselves, as all of the model is here."""
        return self.optimizer.length == self.length and self.masters is None and self.holders is None

    # --- what the optimizer moves ------------------------------------------------------------------------------------

    def _moved(self) -> list[MovedPiece]:
        pieces = []
        for slot in self.slots:
            start = max(slot.span.start, self.optimizer.start)
            stop = min(slot.span.stop, self.optimizer.stop)
            if start < stop or self.optimizer.length == self.length:
                span = Span(start, stop - start)
                if self.direct:
                    tensor = slot.parameter  # all of it is here: it needs no second name
                else:
                    piece = self.local[span.within(self.optimizer)]
                    tensor = nn.Parameter(piece.view(slot.shape) if span == slot.span else piece)
                owned = Owned(slot.name, tensor, slot.shape, span.start - slot.span.start)
                pieces.append(MovedPiece(slot, owned, span))
        return pieces

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _collecting(self) -> Tensor:
        """Room for this rank's gradients, and a view of it for each parameter."""
        room = self.collected = torch.zeros(self.length, dtype=self.full.dtype, device=self.full.device)
        for slot in self.slots:
            slot.view = room[_slice(slot.span)].view(slot.shape)
        return room

    def take(self, slot: ParameterSlot) -> None:
        """A gradient of this round has come. Where gradients are scattered, `.grad` is empty again afterwards."""
        if self.collected is None:
            self._collecting()
        slot.take()
        slot.parameter.grad = None if self.scattered else slot.view
        self.missing -= 1

    def exchange(self, last: bool) -> list[Stage]:
        """The stages that add up this round's gradients, and at the `last` round of a step those of all rounds."""
        buffer = self._sealed()
        stages: list[Stage] = []
        if self.holders is not None and (last or self.scattered):  # chains move in step: each has this stage
            stages.append(partial(_summed, buffer, self.holders.group))
        if self.scattered:
            scatter = self.mesh.scatter(self.length, "params", "grads")
            stages += [stage(buffer, Span(0, self.length), self.residual) for stage in scatter]
            stages.append(self._keep(buffer))
            self._let_go()
        self.holding = len(stages)
        if last:
            made = [*self.mesh.scatter(self.length, "optimizer"), *self.mesh.reduce(self.length)]
            stages += [stage(self.summed, self.grads, self.residual) for stage in made]
        if not self.scattered:  # a sum in place takes no memory, shares of one do
            self.holding = len(stages) * (len(stages) > 1 or self.optimizer.length < self.length)
        return stages

    def _let_go(self) -> None:
        """This round's gradients are the exchange's alone: their room goes with it."""
        self.collected = None
        for slot in self.slots:
            slot.view = None

    def _sealed(self) -> Tensor:
        """This round's gradients, with zeros where there is none."""
        if self.collected is None:
            self._collecting()
        for slot in self.slots:
            assert slot.view is not None
            if self.scattered:
                if not slot.fresh:
                    slot.view.zero_()
            elif slot.parameter.grad is None or isinstance(slot.parameter.grad, ShardedGradient):
                slot.view.zero_()
                slot.used = slot.parameter.grad is not None
            else:
                slot.take()  # also what somebody put there themselves
            slot.fresh = False
        assert self.collected is not None
        if self.weight != 1.0:
            self.collected.mul_(self.weight)
        return self.collected

    def _keep(self, buffer: Tensor) -> Stage:
        def add() -> None:
            mine = buffer[_slice(self.grads)]
            if self.rounds:
                self.summed.add_(mine)
            else:
                self.summed.copy_(mine)
            self.rounds += 1

        return add

    def result(self) -> Tensor:
        """[optimizer span] the gradient of what this rank moves, once all is added up."""
        return self.summed[self.optimizer.within(self.grads)]

    def pieces(self) -> list[Tensor]:
        """The summed gradient of each piece that this rank's optimizer moves; zeros for what no rank used."""
        return [self._piece(moved) for moved in self.moved if moved.owned.tensor.numel()]

    def _piece(self, moved: MovedPiece) -> Tensor:
        tensor = moved.owned.tensor
        piece = self.result()[moved.span.within(self.optimizer)].view(tensor.shape)
        return piece if self.masters is None else piece.to(tensor.dtype)

    def deliver(self, used: Sequence[bool]) -> None:
        """Puts gradients where the optimizer looks for them: None for a parameter that no rank used."""
        for moved in self.moved:
            slot, owned, _ = moved
            if not used[slot.number]:
                owned.tensor.grad = None
            elif owned.tensor is slot.parameter:
                owned.tensor.grad = slot.view
            else:
                owned.tensor.grad = self._piece(moved)

    def attached(self) -> bool:
        """Whether the parameters still are views of this unit."""
        slot = self.slots[0]
        if slot.parameter.dtype != self.full.dtype:
            return False
        return self.sharded or slot.parameter.data_ptr() == self.full[slot.span.start :].data_ptr()

    def drop(self) -> None:
        """Forgets a round that was not exchanged."""
        if self.scattered:
            self._let_go()
        self.clear()

    def clear(self) -> None:
        """Forgets all gradients."""
        self.rounds, self.missing = 0, len(self.slots)
        for slot in self.slots:
            slot.parameter.grad = None
            slot.fresh = slot.used = False
        for _, owned, _ in self.moved:
            owned.tensor.grad = None


def _summed(buffer: Tensor, group: dist.ProcessGroup | None) -> Any:
    if group is None:
        return None
    with traffic(Traffic.GRADIENTS):
        return group.allreduce([buffer], AllreduceOptions())


def _after_copies(weights: WeightStore, stage: Stage) -> Any:
    with weights.after_copies():
        return stage()


def _slice(span: Span) -> slice:
    return slice(span.start, span.stop)
