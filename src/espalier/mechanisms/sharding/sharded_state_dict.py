"""Sharded state dict: model, optimizer and error feedback by name; each rank writes and reads its own share.

Names and shapes are those of the model as its author wrote it, so a checkpoint resumes under any other sharding, on any
number of ranks, or in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.nn import Parameter

from espalier.checkpoint.base import StateDict
from espalier.checkpoint.stored_slice import StoredSlice, fill_slices
from espalier.checkpoint.tensor_slice import Box, RankRow, RowSlice, Slice
from espalier.comm import plain_collectives
from espalier.comm.base import Traffic, traffic
from espalier.optim.base import Optimizer
from espalier.parallel.model_cut import ModelCut

if TYPE_CHECKING:
    from torch import nn

    from espalier.mechanisms.sharding.flat_parameter import FlatParameter, FlatUnit, FrozenUnit, ParameterSlot
    from espalier.plan.axes.placement import Placement
    from espalier.plan.axes.placement_plan import Spread


Kinds = dict[str, dict[str, tuple[torch.dtype, bool]]]
"""Parameter -> kind of state -> its dtype, and whether it is a single number."""


class UnitSharding(Protocol):
    """What a checkpoint needs of a sharding whose parameters lie in units."""

    model: nn.Module
    flats: list[FlatParameter]
    frozen: list[FrozenUnit]
    kinds: Kinds | None
    """What states each parameter has, on all ranks; None while that may still change."""
    cut: ModelCut | None
    """How the model is cut besides; None: it is not."""

    @property
    def spread(self) -> Spread:
        """How the units lie on the ranks."""

    def settle(self) -> None:
        """Returns when every parameter that lives here is up to date."""

    def adopt(self) -> None:
        """Takes what was written into what is owned for everybody's parameters."""

    def summon(self) -> None:
        """Brings all parameters here, until they are let go."""

    def whole(self, flat: FlatUnit, local: Tensor) -> Tensor:
        """The whole unit, of which every rank has `local`."""


class ModelState:
    """Parameters (the masters, where there are any) and buffers by name. Stateful."""

    def __init__(self, sharding: UnitSharding) -> None:
        self._sharding = sharding

    def state_dict(self) -> StateDict:
        """Slices of the parameters that are sharded, other frozen ones and buffers whole."""
        self._sharding.settle()
        cut = self._sharding.cut
        pieces = {
            id(slot.parameter): placed(piece(flat, flat.local, slot), slot.name, cut)
            for flat in self._sharding.flats
            for slot in flat.slots
        }
        pieces |= {id(slot.parameter): unit.piece(slot) for unit in self._sharding.frozen for slot in unit.slots}
        entries = self._sharding.model.state_dict(keep_vars=True)
        return {
            name: pieces[id(value)] if id(value) in pieces else _plain(value, name, cut)
            for name, value in entries.items()
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Takes values of whatever precision into what this rank owns, and brings them to everybody."""
        fill_slices(self.state_dict(), state)
        self._sharding.adopt()


class OptimizerState:
    """The optimizer's state by `name/kind`. Stateful; all ranks call it together."""

    def __init__(self, sharding: UnitSharding, optimizer: Optimizer, channel: dist.ProcessGroup) -> None:
        self._sharding = sharding
        self._optimizer = optimizer
        self._channel = channel
        self._kinds: Kinds | None = sharding.kinds

    def state_dict(self) -> StateDict:
        """Slices of what is shaped like the parameter, and scalars, which the rank with the first element writes."""
        entries = self._optimizer.state_dict()
        table: StateDict = {}
        for flat in self._sharding.flats:
            moved_here = {moved.slot.name: moved for moved in flat.moved}
            for slot in flat.slots:
                for kind, (dtype, scalar) in self._all_kinds(entries).get(slot.name, {}).items():
                    key = f"{slot.name}/{kind}"
                    moved = moved_here.get(slot.name)
                    start = 0 if moved is None else moved.owned.start
                    value = None if moved is None else entries[key]
                    if isinstance(value, StoredSlice):
                        table[key] = placed(
                            replace(value, shape=slot.shape, start=start), slot.name, self._sharding.cut
                        )
                        continue
                    local = torch.empty(int(scalar), dtype=dtype) if value is None else value.view(-1)
                    if scalar:
                        table[key] = Slice(local, torch.Size(), 0, writes=moved is not None and start == 0)
                    else:
                        sliced = Slice(local, slot.shape, start, writes=moved is not None)
                        table[key] = placed(sliced, slot.name, self._sharding.cut)
        return table

    def load_state_dict(self, state: StateDict) -> None:
        """Takes back what `state_dict` gave."""
        fill_slices(self.state_dict(), state)

    def _all_kinds(self, entries: StateDict) -> Kinds:
        """For each parameter, what states it has: also of those this rank holds nothing of."""
        if self._kinds is None:
            mine: Kinds = {}
            for key, value in entries.items():
                name, kind = key.rsplit("/", 1)
                mine.setdefault(name, {})[kind] = (value.dtype, value.ndim == 0)
            with traffic(Traffic.CONTROL):
                everyone = plain_collectives.all_gather(mine, self._channel)
            self._kinds = {name: kinds for rank_kinds in everyone for name, kinds in rank_kinds.items()}
            if all(slot.name in self._kinds for flat in self._sharding.flats for slot in flat.slots):
                self._sharding.kinds = self._kinds  # nothing can be added: no later save needs to ask
        return self._kinds


class Residuals:
    """Error feedback: what lossy codecs have not sent yet, by parameter, saved in a row per rank. Stateful.

    A rank's residual is an error of its own contribution, so a run goes on to the bit only where each rank has its own
    again. On other ranks or shards only the sum of all counts: there the rank that moves a parameter takes it. Saving
    reads and changes nothing, for when a run saves depends on what its saves and steps have taken.
    """

    def __init__(self, sharding: UnitSharding, channel: dist.ProcessGroup) -> None:
        self._sharding = sharding
        self._channel = channel
        self._flats = [flat for flat in sharding.flats if flat.residual is not None]

    def state_dict(self) -> StateDict:
        """This rank's row of each parameter, and the layout under which it has a meaning."""
        rank = self._channel.rank()
        ranks = self._channel.size()
        rows = {}
        for flat in self._flats:
            assert flat.residual is not None
            for slot in flat.slots:
                part = flat.residual[slot.span.start : slot.span.stop]
                rows[slot.name] = RankRow.of_rank(part, slot.shape, rank, ranks)
        return {"layout": self._layout(), "rows": rows}

    def load_state_dict(self, state: StateDict) -> None:
        """Takes back what `state_dict` gave; all ranks call it. What was saved without, by another codec, begins with
        nothing."""
        current = self.state_dict()
        alike = state["layout"] == current["layout"]
        saved = {name: value for name, value in state["rows"].items() if name in current["rows"]}
        rows = {name: current["rows"][name] for name in saved}
        fill_slices(rows, {name: _summed(value, rows[name]) for name, value in saved.items()})
        if not alike:
            for flat in self._flats:
                self._hand_over(flat)

    def _layout(self) -> str:
        """Names where each rank adds its residual to what it sends. Checkpoints hold it, so it is spelled out here and
        follows no class's name."""
        flats = [
            (
                _spelled(flat.mesh.placement),
                flat.length,
                [
                    (slot.name, _Spelled(f"Span(start={slot.span.start}, length={slot.span.length})"))
                    for slot in flat.slots
                ],
            )
            for flat in self._flats
        ]
        spread = self._sharding.spread
        layout = repr((flats, list(spread.nodes), sorted(spread.codecs.items())))
        return xxhash.xxh3_128_hexdigest(layout.encode())

    def _hand_over(self, flat: FlatParameter) -> None:
        """The sum over ranks becomes the residual of the first rank that moves it."""
        assert flat.residual is not None
        total = flat.residual.to("cpu", copy=True)
        with traffic(Traffic.CONTROL):
            dist.all_reduce(total, group=self._channel)
        flat.residual.zero_()
        replicas = flat.mesh.placement.along("replicas")
        if all(axis.coordinate(flat.mesh.rank) == 0 for axis in replicas):
            mine = slice(flat.optimizer.start, flat.optimizer.stop)
            flat.residual[mine] = total[mine].to(flat.residual.device)


# --- of a model in somebody's own loop: hooks of `nn.Module` -----------------------------------------------------


def whole_state_dict(sharding: UnitSharding, module: nn.Module, state: StateDict, prefix: str, _: Any) -> None:
    """`model.state_dict()` has whole parameters on every rank (all ranks call it), masters where there are any."""
    if any(isinstance(value, Parameter) for value in state.values()):
        return  # keep_vars: the parameters themselves are wanted
    pieces: dict[int, Tensor] = {}
    cut = sharding.cut
    for flat in (*sharding.flats, *sharding.frozen):
        if flat.sharded or flat.masters is not None or cut is not None:
            values = sharding.whole(flat, flat.local)
            for slot in flat.slots:
                part = values[slot.span.start : slot.span.stop].view(slot.shape)
                pieces[id(slot.parameter)] = part if cut is None else cut.whole(slot.name, part)
    sharding.settle()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in pieces:
            state[prefix + name] = pieces[id(parameter)]


def load_whole_state_dict(sharding: UnitSharding, module: nn.Module, state: StateDict, prefix: str, *_: Any) -> None:
    """Before `model.load_state_dict(state)`: each rank takes its own share of whole parameters."""
    entries = ModelState(sharding).state_dict()
    known = {name: value for name, value in entries.items() if prefix + name in state}
    fill_slices(known, {name: state[prefix + name] for name in known})
    sharding.adopt()
    sharding.summon()
    if sharding.cut is not None:  # torch then copies what it finds in `state`
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = parameter.detach()


def piece(flat: FlatParameter, local: Tensor, slot: ParameterSlot) -> Slice:
    """This rank's part of a parameter, with the values in `local` [optimizer span]."""
    for moved in flat.moved:
        if moved.slot is slot:
            return Slice(local[moved.span.within(flat.optimizer)], slot.shape, moved.owned.start)
    return Slice(local[:0], slot.shape, 0, writes=False)


def placed(sliced: Slice, name: str, cut: ModelCut | None) -> Slice:
    """A slice of the parameter that this rank has, as one of the whole model's."""
    if cut is not None and name in cut.recut and not cut.recut[name].first:
        sliced = replace(sliced, writes=False)  # boxes of another cut would overlap those of the first
    slab = None if cut is None else cut.slabs.get(name)
    if slab is None:
        return sliced
    return replace(sliced, shape=slab.shape, part=Box(slab.offsets, tuple(sliced.shape)))


def _plain(value: Any, name: str, cut: ModelCut | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if cut is None or not (name in cut.slabs or name in cut.recut):
        return value
    return placed(Slice(value.contiguous().view(-1), value.shape, 0), name, cut)


class _Spelled(str):
    """Text that stands in a tuple without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _spelled(placement: Placement) -> _Spelled:
    """A placement as checkpoints name it."""
    params, grads, optimizer = placement.factors
    axes = tuple(
        _Spelled(f"Axis(state={axis.state!r}, size={axis.size}, stride={axis.stride})") for axis in placement.axes
    )
    factors = f"Factors(params={params}, grads={grads}, optimizer={optimizer})"
    words = f"ranks={placement.ranks}, factors={factors}, axes={axes!r}, by_level={placement.by_level}"
    return _Spelled(f"Placement({words})")


def _summed(saved: Slice, row: RankRow) -> Slice:
    """One row of all the saved ones that this rank has read."""
    if not isinstance(saved, RowSlice):
        return saved
    return row.of(saved.local.view(len(saved.rows), row.local.numel()).sum(0))
