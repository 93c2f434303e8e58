"""Parameters, gradients and optimizer states, each split over its own number of ranks. After AMSP, arXiv 2311.00257.

One engine for every nested triple of factors (params, grads, optimizer) on D ranks: (1,1,1) is plain data parallel,
(1,1,D) ZeRO-1, (1,D,D) ZeRO-2, (D,D,D) ZeRO-3 or FSDP, (s,s,s) HSDP or MiCS, and all between. Different parameters may
have different factors. It deviates from the paper and from others where that is simpler or exact:

- The sum of gradients is a sum, not a mean: losses are divided by the weight of the whole batch before backward, so
  ranks may have unequal shares.
- Moved parameters come back by one gather per unit, in forward order, awaited where they are first used (the original
  sends a broadcast per owner).
- Every exchange goes along the axes of the mesh, inside machines first (`placement`).
- A parameter that no rank used keeps `.grad = None`, as on one rank; one that some used never waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllreduceOptions

from espalier.checkpoint.base import Stateful, StatefulParts
from espalier.comm.base import Traffic, traffic
from espalier.comm.plain_collectives import RankGroup
from espalier.mechanisms.sharding.async_collectives import Chain, Exchanges
from espalier.mechanisms.sharding.axis_groups import AxisGroups, Codecs, Groups
from espalier.mechanisms.sharding.broadcast import BufferSync, same_start
from espalier.mechanisms.sharding.flat_parameter import FlatParameter, FlatUnit, FrozenUnit, ParameterSlot
from espalier.mechanisms.sharding.gather_hooks import GatherHooks
from espalier.mechanisms.sharding.model_signature import ModelSignature, twice
from espalier.mechanisms.sharding.sharded_state_dict import Kinds, ModelState, OptimizerState, Residuals
from espalier.optim.base import Optimizer, Owned, names_of, owned_by
from espalier.parallel.model_cut import ModelCut
from espalier.plan.axes.flat_layout import Arranged, Piece
from espalier.plan.axes.placement import ShardFactors, place
from espalier.plan.axes.placement_plan import Spread, flags_per_value, groups, units
from espalier.recipe.errors import UserError
from espalier.train.wrap_policy import Membership, blocks_of, norms_of

_WRAPPINGS: WeakKeyDictionary[nn.Module, ref[Amsp]] = WeakKeyDictionary()
"""The last wrapping of each model that has hooks on it."""


class Amsp:
    """See `Sharding`. Has state: the units, hooks, and the exchanges under way.

    Args:
        model: changed in place: its parameters and buffers become rank 0's, its parameters views of units. An earlier
            wrapping ends: after a rank was lost, the same process wraps the model again.
        channel: the ranks (a Channel, or any process group); None, or a group of one rank, adds nothing.
        spread: how it is to lie on them.
        cut: how the model is cut besides; what `channel` says is then of the ranks that hold the same part.
        whole: the model that is called, where `model` is a part of it; None: `model`.

    Raises:
        UserError: the ranks' models differ in a name, shape or dtype (named); factors do not nest or divide the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        channel: RankGroup,
        spread: Spread | None = None,
        cut: ModelCut | None = None,
        whole: nn.Module | None = None,
    ) -> None:
        earlier = _WRAPPINGS.pop(model, None)
        if earlier is not None and (ended := earlier()) is not None:
            ended.unhook()
        self.model = model
        self._called = whole or model
        self.spread = spread or Spread()
        self.cut = cut
        self._channel = channel if channel is not None and (channel.size() > 1 or cut is not None) else None
        self._gathers = self._channel is not None or self.spread.weights is not None
        self.flats: list[FlatParameter] = []
        self.frozen: list[FrozenUnit] = []
        self._hooks: list[Any] = []
        self._armed: bool | None = None
        self._ended: bool | None = None
        self._launched = 0
        self.on_backward: Callable[[], None] | None = None
        self.together = False
        self._norm: float | None = None
        self.kinds: Kinds | None = None
        """What states each parameter has, on all ranks; None while that may still change."""
        self.owned: Sequence[Owned] = owned_by(model)
        self._in_order = self.owned
        if not self._gathers:
            return
        self._reducing = Exchanges()
        self._moving = Exchanges()
        self._sending: list[tuple[Chain, FlatParameter]] = []
        blocks = blocks_of(self._called) if self.spread.blocks is None else self.spread.blocks
        self._member = Membership(self._called, list(blocks))
        if self._channel is not None:
            same_start(model, self._channel)
            self._running = BufferSync(model, self._channel)
        self._meshes = self._placed()
        if self._channel is not None:
            self._spread_states(blocks)
        if cut is None:
            self.frozen = self._frozen_units()
        self.together = cut is not None or any(flat.sharded for flat in self.flats) or bool(self.frozen)
        self._windows = GatherHooks(
            self._called, self._member, [*self.flats, *self.frozen], self._moving, self.spread.prefetch
        )
        _WRAPPINGS[model] = ref(self)

    # --- making the units --------------------------------------------------------------------------------------------

    def _spread_states(self, blocks: Sequence[nn.Module]) -> None:
        """Makes the units of what is trained, and listens to its gradients and to the last of `blocks`."""
        self.flats = self._units()
        moved = [piece for flat in self.flats for piece in flat.moved]
        self.owned = [piece.owned for piece in moved]
        self._in_order = [piece.owned for piece in sorted(moved, key=lambda piece: piece.slot.number)]
        for flat in self.flats:
            for slot in flat.slots:
                hook = slot.parameter.register_post_accumulate_grad_hook(self._arrival(flat, slot))
                self._hooks.append(hook)
        last = blocks[-1] if len(blocks) else self._called
        self._hooks.append(last.register_forward_hook(lambda *_: self._arrived()))
        self._seen = ModelSignature(self.model)

    def _placed(self) -> dict[ShardFactors, AxisGroups]:
        """The ranks of all factors that the parameters have."""
        channel = self._channel
        spread = self.spread
        world = 1 if channel is None else channel.size()
        made = Groups()
        nodes = spread.nodes or [0] * world
        codecs = Codecs(spread.codecs, nodes) if spread.codecs else None
        chosen = (spread.of(name).check(world, f"shard of {name!r}") for name, _ in self.model.named_parameters())
        return {factors: AxisGroups(place(factors, nodes), channel, made, codecs) for factors in dict.fromkeys(chosen)}

    def _arranged(self, slots: Sequence[ParameterSlot], kinds: Sequence[Any], fetched: bool = False) -> list[Arranged]:
        """Which parameters share a unit. `kinds`: of each, those of one kind may; `fetched`: of one block."""
        chosen = [self.spread.of(slot.name) for slot in slots]
        grouped = groups(chosen, [self._member.of(slot.parameter) for slot in slots], kinds, fetched)
        pieces = [
            Piece(
                slot.parameter.numel(),
                slot.parameter.element_size(),
                group,
                whole=slot.name in self.spread.whole and group.factors.optimizer > 1,
            )
            for slot, group in zip(slots, grouped, strict=True)
        ]
        return units(pieces, {f: mesh.placement for f, mesh in self._meshes.items()}, self.spread.bucket_bytes)

    def _frozen_units(self) -> list[FrozenUnit]:
        """Of the blocks, where parameters are sharded, or frozen ones wait in host memory. What lies outside is needed
        all the time, and stays whole."""
        weights = self.spread.weights
        device = next(p.device for p in self.model.parameters() if p.requires_grad)
        slots = [
            ParameterSlot(name, parameter, number)
            for number, (name, parameter) in enumerate(self.model.named_parameters())
            if not parameter.requires_grad
            and parameter.numel()
            and self._member.of(parameter) is not None
            and (weights is not None or self.spread.of(name).params > 1)
        ]
        kinds = [(slot.parameter.dtype, slot.parameter.device) for slot in slots]
        return [
            FrozenUnit(members, unit, self._meshes[self.spread.of(members[0].name)], device, weights)
            for unit in self._arranged(slots, kinds, weights is not None)
            for members in [[slots[index] for index in unit.indices]]
        ]

    def _units(self) -> list[FlatParameter]:
        slots = [ParameterSlot(name, parameter, n) for n, (parameter, name) in enumerate(names_of(self.model).items())]
        exact = norms_of(self.model)  # norms keep their precision, as under autocast
        holders = [None if self.cut is None else self.cut.held_by(slot.name) for slot in slots]
        kinds = [
            (p.dtype, p.device, p.dtype == torch.float32 and id(p) not in exact, holder)
            for p, holder in zip((slot.parameter for slot in slots), holders, strict=True)
        ]
        return [
            FlatParameter(
                [slots[index] for index in unit.indices],
                unit,
                self._meshes[self.spread.of(slots[unit.indices[0]].name)],
                self.spread.low if kinds[unit.indices[0]][2] else None,
                holders[unit.indices[0]],
            )
            for unit in self._arranged(slots, kinds)
        ]

    # --- one step ----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        for flat in self.flats:
            flat.clear()

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """See `Sharding.accumulate`. Raises UserError when the model has changed since it was wrapped."""
        return self.alone() if self._channel is None else self._round(last)

    @contextmanager
    def _round(self, last: bool) -> Iterator[None]:
        self._ended = None  # an error inside leaves no half step to wait for
        self._seen.check(self.model)
        self.begin_round(last)
        try:
            yield
        except BaseException:
            self._armed = None  # the model may be wrapped anew: these hooks are to take no gradient any more
            raise
        self.end_round()
        self._ended = last

    def begin_round(self, last: bool) -> None:
        """Gradients of one more micro-batch are to come."""
        self._launched = 0
        self._armed = last
        for flat in self.flats:
            flat.missing = len(flat.slots)

    def end_round(self) -> None:
        """Backward is done: what is incomplete (parameters that were not used) goes out as it is."""
        if self._armed is not None:
            self._launch_ready(everything=True)
            self._armed = None
        self._windows.let_go()

    def abandon(self) -> None:
        """Drops a round that an error ended; what this rank had begun to exchange is waited for."""
        self._armed = None
        self._reducing.finish()
        self._windows.let_go()
        for flat in self.flats:
            flat.drop()

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._armed = None
        yield
        self.let_go()

    def _arrival(self, flat: FlatParameter, slot: ParameterSlot) -> Any:
        def arrived(_: Tensor) -> None:
            if self._armed is None:
                if self.on_backward is None:
                    return
                self.on_backward()
            flat.take(slot)
            if flat.missing < 0:
                raise twice(slot.name)
            if flat.missing == 0:
                self._windows.gradients_are_there(flat)
                self._launch_ready()
            else:
                self._reducing.advance()  # a slow link should not stand still until the next unit is complete

        return arrived

    def _launch_ready(self, everything: bool = False) -> None:
        """Launches complete units in their fixed order, which all ranks share whatever order gradients come in."""
        last = bool(self._armed)
        while self._launched < len(self.flats):
            flat = self.flats[self._launched]
            if flat.missing and not everything:
                break
            if last or flat.scattered:
                self._make_room(flat)
                stages = flat.exchange(last)
                self._sending.append((self._reducing.begin(stages), flat))
            self._launched += 1
        self._reducing.advance()

    def _arrived(self) -> None:
        """What the round before has left on its way had a forward pass to arrive in."""
        if torch._C._current_graph_task_id() == -1:  # not where the pass runs again in backward
            self._make_room()

    def _make_room(self, flat: FlatParameter | None = None) -> None:
        """Waits until what is on its way leaves room for `flat` (None: for everything)."""
        self._sending = [(chain, other) for chain, other in self._sending if chain.ended < other.holding]
        while self._sending and not (flat and self._has_room(flat)):
            chain, other = self._sending.pop(0)
            self._reducing.finish(chain, other.holding)

    def _has_room(self, flat: FlatParameter) -> bool:
        """Two buckets are on their way at most, or one block (another may cross the network while it is summed in a
        machine)."""
        if not flat.sharded:
            return (
                sum(other.full.nbytes for _, other in self._sending) + flat.full.nbytes <= 2 * self.spread.bucket_bytes
            )
        blocks = {self._member.of(other.slots[0].parameter) for _, other in self._sending}
        return len(blocks - {self._member.of(flat.slots[0].parameter)}) <= flat.mesh.placement.by_level

    def wait(self, totals: Tensor | None = None) -> None:
        """See `Sharding.wait`.

        Raises:
            UserError: no backward ran in `accumulate(last=True)`.
            RunFailed: a rank did not take part in time.
        """
        if self._channel is None:
            return
        if self._ended is not True:
            raise UserError(
                "Amsp.wait() was called before a backward pass.",
                do="run the step's last backward inside `with sharding.accumulate(last=True):`",
            )
        self._ended = None
        self.finish(totals=totals)

    def finish(self, carried: Mapping[FlatParameter, Tensor] | None = None, totals: Tensor | None = None) -> list[bool]:
        """Waits for the exchange of gradients and hands them to what is owned, with what was `carried` from before.
        Returns for each trainable parameter whether any rank used it.

        Beside the gradients there is one small sum: `totals`, which parameters were used, and where the optimizer's
        state is sharded the square of the norm. Without the last it travels behind the gradients. Of a model that is
        cut, totals and square are summed by a second one, over all ranks that hold a part of it.
        """
        control = steering = self.flags(totals if self.cut is None else None)
        sharded = self.cut is not None or any(flat.optimizer.length < flat.length for flat in self.flats)
        if self.cut is not None:
            steering = ControlMessage(self.cut.replica, totals, [], control.device)
        if control is not steering or not sharded:
            control.launch()
        self._reducing.finish()
        for flat in self.flats:
            if carried and flat in carried:
                flat.result().add_(carried[flat])
        if sharded:
            steering.launch(self.square())
        used, square = control.wait()
        if control is not steering:
            _, square = steering.wait()
        self._norm = math.sqrt(square) if sharded else None
        self.deliver(used)
        return used

    def flags(self, totals: Tensor | None = None, channel: RankGroup = None) -> ControlMessage:
        """The message that tells the ranks (or those of `channel`) which parameters were used, with `totals`; not sent
        yet."""
        assert self._channel is not None
        slots = sorted((slot for flat in self.flats for slot in flat.slots), key=lambda slot: slot.number)
        host = _host(self._channel, slots)
        return ControlMessage(channel or self._channel, totals, [slot.used for slot in slots], host)

    def complete(self) -> None:
        """Returns when the exchange of gradients is through; `deliver` hands them on."""
        self._ended = None
        self._reducing.finish()

    def deliver(self, used: Sequence[bool]) -> None:
        """Hands the summed gradients to what is owned. `used`: of each trainable parameter, whether any rank did."""
        for flat in self.flats:
            flat.deliver(used)

    def square(self) -> float:
        """This rank's part of the squared 2-norm of the summed gradient: what several ranks hold counts once."""
        total = torch.zeros((), dtype=torch.float64, device=self.flats[0].full.device)
        for flat in self.flats:
            pieces = flat.pieces()
            if pieces:
                total += torch.stack(torch._foreach_norm(pieces)).double().square().sum() / flat.copies
        return float(total)

    def norm(self) -> float:
        if self._norm is not None:
            return self._norm
        grads = [owned.tensor.grad for owned in self._in_order if owned.tensor.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))  # in the model's order: the same bits for any units

    def refresh(self) -> None:
        if self._channel is not None:
            self._windows.refresh()
            self._running.spread()

    def idle(self, times: int) -> None:
        for _ in range(times if self.together else 0):
            self._windows.idle()
        self.settle()  # ranks that compute wait for a refresh of several stages on this one

    # --- the whole model ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Returns when every parameter that lives here is up to date."""
        if self._gathers:
            self._windows.settle()

    def gathered(self, module: nn.Module) -> AbstractContextManager[None]:
        """Surrounds a pass without gradients through a block; of the whole model: through all of it."""
        return self._windows.gathered(module)

    def summon(self) -> None:
        """Brings all parameters here, until `let_go`."""
        if self._gathers:
            self._windows.summon()

    def let_go(self) -> None:
        """Ends what `summon` began."""
        if self._gathers:
            self._windows.let_go()

    def adopt(self) -> None:
        """Takes what was written into what is owned for everybody's parameters. All ranks have the same buffers."""
        if self._channel is not None:
            self._windows.refresh()
            self._windows.settle()
            self._running.begins()

    def bytes_held(self) -> Mapping[str, int]:
        away = self.spread.weights is not None
        shared = sum(unit.part.nbytes for unit in self.frozen)
        if not self.flats:
            parameters = [
                *self._unshared(),
                *(parameter for parameter in self.model.parameters() if parameter.requires_grad),
            ]
            grads = sum(parameter.nbytes for parameter in parameters if parameter.grad is not None)
            params = sum(parameter.nbytes for parameter in parameters)
            return {"params": params, "grads": grads, "masters": 0, "waiting": shared}
        return {
            "params": sum(flat.part.nbytes for flat in self.flats),
            "grads": sum(flat.summed.nbytes for flat in self.flats),
            "masters": sum(flat.masters.nbytes for flat in self.flats if flat.masters is not None),
            "feedback": sum(flat.residual.nbytes for flat in self.flats if flat.residual is not None),
            "frozen": (0 if away else shared) + sum(p.nbytes for p in self._unshared()),
            "waiting": shared if away else 0,
        }

    def _unshared(self) -> list[nn.Parameter]:
        """Frozen parameters of which every rank has all."""
        shared = {slot.parameter for unit in self.frozen for slot in unit.slots}
        return [p for p in self.model.parameters() if not p.requires_grad and p not in shared]

    def parts(self, optimizer: Optimizer) -> StatefulParts:
        if self._channel is None:
            return {"model": self.model, "optimizer": optimizer}
        parts: dict[str, Stateful] = {
            "model": ModelState(self),
            "optimizer": OptimizerState(self, optimizer, self._channel),
        }
        if any(flat.residual is not None for flat in self.flats):
            parts["feedback"] = Residuals(self, self._channel)
        return parts

    def whole(self, flat: FlatUnit, local: Tensor) -> Tensor:
        """[unit] every rank's `local` values [optimizer span] of a unit, on every rank. All ranks call it."""
        self.settle()
        buffer, stages = flat.assembled(local)
        self._moving.finish(self._moving.begin(stages))
        return buffer

    def detach(self) -> None:
        if not self._gathers:
            return
        for flat in (*self.flats, *self.frozen):
            values = self.whole(flat, flat.local)
            for slot in flat.slots:
                slot.parameter.data = values[slot.span.start : slot.span.stop].view(slot.shape).clone()
        self.unhook()
        self.flats, self.frozen, self.owned, self._channel, self.together = [], [], owned_by(self.model), None, False
        self._gathers = False

    def unhook(self) -> None:
        """Takes off every hook, and the gradients: with them go the buffers of a wrapping that nobody else holds."""
        self._windows.detach()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for flat in self.flats:
            flat.clear()


class ControlMessage:
    """The one small all-reduce of a step: totals, used-parameter flags, the squared gradient norm.

    Has state: the vector under way.

    Args:
        channel: the ranks.
        totals: float64, summed in place; None: nothing.
        used: whether this rank used each trainable parameter.
        device: where the vector lies.
    """

    def __init__(
        self, channel: dist.ProcessGroup, totals: Tensor | None, used: Sequence[bool], device: torch.device
    ) -> None:
        self._channel, self._totals, self._count, self.device = channel, totals, len(used), device
        per = int(flags_per_value(channel.size()))
        self._digits = np.int64(channel.size() + 1) ** np.arange(per, dtype=np.int64)
        flags = np.zeros(-(-len(used) // per) * per, dtype=np.int64)
        flags[: len(used)] = used
        self._counts = torch.from_numpy(flags.reshape(-1, per) @ self._digits).double()
        self._vector = torch.empty(0)
        self._work: Any = None

    def launch(self, square: float = 0.0) -> None:
        """Begins the sum. `square`: this rank's part of a squared norm."""
        parts = [torch.tensor([square], dtype=torch.float64), self._counts]
        if self._totals is not None:
            parts.append(self._totals)
        self._vector = torch.cat(parts).to(self.device)
        with traffic(Traffic.CONTROL):
            self._work = self._channel.allreduce([self._vector], AllreduceOptions())

    def wait(self) -> tuple[list[bool], float]:
        """Whether any rank used each parameter, and the summed square; the totals are summed in place."""
        self._work.wait()
        summed = self._vector.cpu()
        counts = summed[1 : 1 + len(self._counts)].numpy().astype(np.int64)
        if self._totals is not None:
            self._totals.copy_(summed[1 + len(self._counts) :])
        used = (counts[:, None] // self._digits % (self._channel.size() + 1) > 0).reshape(-1)[: self._count]
        return used.tolist(), float(summed[0])


def _host(channel: dist.ProcessGroup, slots: Sequence[ParameterSlot]) -> torch.device:
    """Where small tensors that only steer live."""
    kinds = [device.type for device in channel._device_types]
    return torch.device("cpu") if not kinds or "cpu" in kinds else slots[0].parameter.device
