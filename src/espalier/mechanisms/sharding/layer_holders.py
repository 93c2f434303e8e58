"""Ragged states: a sharding whose parameters are held by unlike sets of ranks, as in pipelines of different depth.

The parameters with the same holders are a part, with buckets, codecs and shards of optimizer states of its own (AMSP,
`mechanisms.sharding.amsp`, inside each part). After FlashFlex (arXiv 2409.01143), which sums gradients layer by
layer; here all
layers of one set of holders go together. Where pipelines cut a matrix over unlike numbers of ranks, the paper sums its
pieces in groups of ranks, the narrow ones repeated; here all holders sum its whole form (`RecutSum`), so that any two
cuts will do. One small sum over all ranks steers a step: totals, and the norm of all parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllreduceOptions

from espalier.checkpoint.base import Stateful, StatefulParts
from espalier.comm import plain_collectives
from espalier.comm.base import Traffic, traffic
from espalier.mechanisms.sharding.amsp import Amsp, ControlMessage
from espalier.mechanisms.sharding.flat_parameter import FlatParameter, FlatUnit, FrozenUnit, ParameterSlot
from espalier.mechanisms.sharding.sharded_state_dict import Kinds, ModelState, OptimizerState
from espalier.optim.base import Optimizer, Owned
from espalier.parallel.mesh import ProcessMesh
from espalier.parallel.model_cut import ModelCut
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.placement_plan import Spread
from espalier.plan.axes.state_holders import nested
from espalier.recipe.errors import UserError


class RaggedStates:
    """See `Sharding`. Has state: the parts, and the norm of the last step.

    Args:
        model: changed in place, as by `Amsp`.
        mesh: the ranks.
        spread: how states lie on the ranks; those of a part are split over the most of its holders that do not exceed
            that (`plan.axes.state_holders.nested`).
        cut: how the model is cut, with the `peers` of each parameter.
        nodes: the machine of each rank of the run.

    Raises:
        UserError: parameters or gradients are to be sharded over ranks that have unlike numbers of micro-batches.
    """

    def __init__(
        self, model: nn.Module, mesh: ProcessMesh, spread: Spread, cut: ModelCut, nodes: Sequence[int]
    ) -> None:
        self.model = model
        self.spread = spread
        self._replica = cut.replica
        self.cut: ModelCut | None = cut
        self._idle = cut.idle
        if not cut.in_step and any(factors.grads > 1 for _, factors in spread.factors):
            raise UserError(
                "Pipelines that are cut at different layers, and waves of tasks, shard optimizer states only.",
                why="parameters and gradients are exchanged in every micro-batch, and their ranks have unlike numbers "
                "of these",
                do="plan.pin.shard.params=1 and plan.pin.shard.grads=1",
            )
        of_holders: dict[tuple[int, ...], set[int]] = {}
        for name, parameter in model.named_parameters():
            of_holders.setdefault(cut.peers[name], set()).add(id(parameter))
        self.members: list[Amsp] = []
        self._recut: dict[Amsp, RecutSum] = {}
        if cut.recut:
            _ = mesh.alone  # made before the groups of holders: ranks would else have made unlike numbers of groups
        mesh.number_groups_alike()  # ranks that share matrices have made one more
        for ranks in _everyones(list(of_holders), self._replica):  # groups are made in one order
            if ranks in of_holders:
                names = [name for name, parameter in model.named_parameters() if id(parameter) in of_holders[ranks]]
                recut = names[0] in cut.recut
                part = self._part_of(of_holders[ranks], ranks, mesh, nodes, recut)
                self.members.append(part)
                if recut and (group := mesh.of(ranks)) is not None:
                    self._recut[part] = RecutSum(part, group, cut)
            mesh.number_groups_alike()
        self.owned: Sequence[Owned] = [owned for part in self.members for owned in part.owned]
        self.flats: list[FlatParameter] = [flat for part in self.members for flat in part.flats]
        self.frozen: list[FrozenUnit] = []  # of a model that is cut frozen parameters stay whole
        self._part = {id(flat): part for part in self.members for flat in part.flats}
        self.kinds: Kinds | None = None
        self.together = True
        self._norm = 0.0

    def _part_of(
        self, parameters: set[int], ranks: tuple[int, ...], mesh: ProcessMesh, nodes: Sequence[int], recut: bool
    ) -> Amsp:
        """The `parameters`, which `ranks` hold; `recut`: unlike parts of them, so that each has its states."""
        spread = self.spread
        if recut:
            ranks = (mesh.rank,)
            spread = replace(spread, codecs={})
        lying = replace(
            spread,
            factors=[
                (pattern, ShardFactors(*map(int, nested(factors, len(ranks))))) for pattern, factors in spread.factors
            ],
            nodes=[nodes[rank] for rank in ranks] if spread.nodes else (),
        )
        return Amsp(part_of(self.model, parameters), mesh.of(ranks) or mesh.alone, lying, self.cut, self.model)

    # --- one step ----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        for part in self.members:
            part.clear()

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return self._within(lambda part: part.accumulate(last))

    def alone(self) -> AbstractContextManager[None]:
        return self._within(Amsp.alone)

    @contextmanager
    def _within(self, context: Callable[[Amsp], AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for part in reversed(self.members):  # left in order
                stack.enter_context(context(part))
            yield

    def wait(self, totals: Tensor | None = None) -> None:
        recut = self._recut
        flags = [part.flags(channel=recut[part].group if part in recut else None) for part in self.members]
        for flag in flags:
            flag.launch()
        for part in self.members:
            part.complete()
        for unlike in recut.values():
            unlike.sum()
        steering = ControlMessage(self._replica, totals, [], flags[0].device)
        steering.launch(sum(part.square() / (recut[part].pipelines if part in recut else 1) for part in self.members))
        for part, flag in zip(self.members, flags, strict=True):
            used, _ = flag.wait()
            part.deliver(used)
        _, square = steering.wait()
        self._norm = math.sqrt(square)

    def norm(self) -> float:
        return self._norm

    def refresh(self) -> None:
        for part in self.members:
            part.refresh()

    def settle(self) -> None:
        for part in self.members:
            part.settle()

    def idle(self, times: int) -> None:
        """See `Sharding.idle`: parameters are gathered in the order of a forward pass, and tokens may go to experts
        here."""
        self.settle()
        for _ in range(times):
            with self._within(lambda part: part.gathered(self.model)):
                for block in self.spread.blocks or ():
                    self._idle_in(block)

    def _idle_in(self, block: nn.Module) -> None:
        inside = set(block.modules())
        with self._within(lambda part: part.gathered(block)):
            for module, take_part in self._idle:
                if module in inside:
                    take_part()

    # --- the whole model ---------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        for part in self.members:
            part.adopt()

    def summon(self) -> None:
        """Brings all parameters here, until a pass lets them go."""
        for part in self.members:
            part.summon()

    def bytes_held(self) -> Mapping[str, int]:
        sizes = Counter[str]()
        for part in self.members:
            sizes.update(part.bytes_held())
        return sizes

    def whole(self, flat: FlatUnit, local: Tensor) -> Tensor:
        """[unit] every rank's `local` values of a unit, on every rank that holds it."""
        return self._part[id(flat)].whole(flat, local)

    def parts(self, optimizer: Optimizer) -> StatefulParts:
        states: dict[str, Stateful] = {
            "model": ModelState(self),
            "optimizer": OptimizerState(self, optimizer, self._replica),
        }
        for part in self.members:
            feedback = part.parts(optimizer).get("feedback")
            if feedback is not None:
                states[f"feedback of {min(slot.name for flat in part.flats for slot in flat.slots)}"] = feedback
        return states

    def detach(self) -> None:
        for part in self.members:
            part.detach()
        self.owned = [owned for part in self.members for owned in part.owned]
        self.flats = []


class RecutSum:
    """Sums gradients of parameters that pipelines cut over unlike numbers of ranks: each writes what it has into the
    whole form, all holders sum that, and each takes its part. Exact sums, as codecs keep residuals of parts.

    Args:
        part: the parameters, of which this rank has all states of its own part.
        group: all ranks that hold any of them.
        cut: what this rank holds of each.
    """

    def __init__(self, part: Amsp, group: dist.ProcessGroup, cut: ModelCut) -> None:
        self.group = group
        self._cut = cut
        slots = [(slot, flat) for flat in part.flats for slot in flat.slots]
        self.pipelines = cut.recut[slots[0][0].name].pipelines
        self._buckets: list[list[tuple[ParameterSlot, FlatParameter, torch.Size]]] = []
        size = math.inf
        kind = torch.float32
        for slot, flat in sorted(slots, key=lambda pair: (str(pair[1].full.dtype), pair[0].name)):
            shape = cut.slabs[slot.name].shape if slot.name in cut.slabs else slot.shape
            if size >= part.spread.bucket_bytes or flat.full.dtype != kind:
                self._buckets.append([])
                size = 0
                kind = flat.full.dtype
            self._buckets[-1].append((slot, flat, shape))
            size += shape.numel() * kind.itemsize

    def sum(self) -> None:
        """All holders call it, once their own gradients are there."""
        for bucket in self._buckets:
            flat = bucket[0][1].full
            whole = [flat.new_zeros(shape) for _, _, shape in bucket]
            gradients = [self._own(slot, flat) for slot, flat, _ in bucket]
            for (slot, _, _), form, gradient in zip(bucket, whole, gradients, strict=True):
                slab = self._cut.slabs.get(slot.name)
                if slab.stands if slab is not None else self._cut.recut[slot.name].stands:
                    self._cut.part(slot.name, form, slot.shape).copy_(gradient)
            together = torch.cat([gradient.view(-1) for gradient in whole])
            with traffic(Traffic.GRADIENTS):
                self.group.allreduce([together], AllreduceOptions()).wait()
            summed = together.split([gradient.numel() for gradient in whole])
            for (slot, _, shape), form, gradient in zip(bucket, summed, gradients, strict=True):
                gradient.copy_(self._cut.part(slot.name, form.view(shape), slot.shape))

    def _own(self, slot: ParameterSlot, flat: FlatParameter) -> Tensor:
        return flat.summed[slot.span.start : slot.span.stop].view(slot.shape)


def part_of(model: nn.Module, parameters: set[int]) -> nn.Module:
    """The part of a model that has the `parameters` (by their ids), with their names: modules with parameters of their
    own are themselves; what holds them are containers."""
    part = nn.Module()
    for name, parameter in model._parameters.items():
        if parameter is not None and id(parameter) in parameters:
            part.register_parameter(name, parameter)
    for name, child in model._modules.items():
        ids = set() if child is None else {id(parameter) for parameter in child.parameters()}
        if child is not None and ids & parameters:
            direct = any(parameter is not None for parameter in child._parameters.values())
            part.add_module(name, child if direct and ids <= parameters else part_of(child, parameters))
    return part


def _everyones(holders: list[tuple[int, ...]], replica: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """The sets of holders of all ranks, in one order."""
    with traffic(Traffic.CONTROL):
        gathered = plain_collectives.all_gather([list(holder) for holder in holders], replica)
    return sorted({tuple(holder) for some in gathered for holder in some})
