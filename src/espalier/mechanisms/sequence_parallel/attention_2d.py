"""2D attention over cut sequences: heads x context (LoongTrain, arXiv 2406.18485), as a function and as a mechanism.

The ranks of a sequence form a grid. Those of a row share a slot of the sequence and divide the heads (`ulysses`); those
of a column pass keys and values round a double ring (`ring`). One row is Ulysses, one column is ring attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from espalier.comm.base import Traffic, traffic
from espalier.comm.plain_collectives import RankGroup
from espalier.mechanisms.sequence_parallel.ring import DoubleRing, RingRanks, Rings, ring_attention
from espalier.parallel.sequence_slots import Bounds, SequenceSlots, bounds_of
from espalier.parallel.ulysses import HeadExchange, HeadSplit
from espalier.plan.compose import Claim
from espalier.recipe import decoder_shapes
from espalier.recipe.errors import UserError
from espalier.train.mechanism import Build, Mechanism
from espalier.train.seams import Filled, fields_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from torch import nn

    from espalier.parallel.attend import Where
    from espalier.parallel.mesh import ProcessMesh
    from espalier.plan.base import Plan
    from espalier.recipe import Recipe


@dataclass(frozen=True, eq=False)
class AttentionGrid:
    """The ranks of a sequence, as one of them sees them. Immutable.

    Attributes:
        rings: the shape of its column.
        keys, gradients: the (inner, outer) rings of keys and values, and of their gradients.
        row: the ranks that share its slot; None where there is one. head: this rank in it.
    """

    rings: Rings
    keys: tuple[RingRanks, RingRanks]
    gradients: tuple[RingRanks, RingRanks]
    row: RankGroup = None
    head: int = 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, slots: SequenceSlots, documents: Tensor | None
    ) -> Tensor:
        """Attention over the whole sequences; see the function `attend`."""
        width = 1 if self.row is None else self.row.size()
        degrees = self.rings.window * self.rings.windows, width
        assert (slots.context, slots.heads) == degrees, f"slots for {slots.context} x {slots.heads}, ranks {degrees}"
        pieces = slots.pieces(self.rings.slot)
        if query.shape[2] != pieces[self.head]:
            raise UserError(
                f"This rank holds {pieces[self.head]} of {slots.length} tokens, and the queries are {query.shape[2]}.",
                do="SequenceSlots(length, ...).take(tokens, rank), and the same slots for attend",
            )
        ring = DoubleRing(slots, self.rings, _bounds(documents, slots.length), self.keys, self.gradients)
        core = partial(ring_attention, ring)
        if slots.context == 1 and documents is None:  # one block
            core = partial(F.scaled_dot_product_attention, is_causal=slots.causal, enable_gqa=True)
        if self.row is None:
            return core(query, key, value)
        split = HeadSplit(query.shape[1], key.shape[1], width, slots.head_shares)
        exchange = HeadExchange(split, pieces, self.row, self.head)
        return exchange.to_tokens(core(*exchange.to_heads(query, key, value)))


def _bounds(documents: Tensor | None, length: int) -> Bounds:
    """Those of the same tensor are found once for all layers."""
    if documents is None:
        return bounds_of(None, length)
    known = _BOUNDS.get(documents)
    version = 0 if documents.is_inference() else documents._version
    if known is None or known[0] != version:
        known = _BOUNDS[documents] = (version, bounds_of(documents, length))
    return known[1]


_BOUNDS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


# --- for any program -------------------------------------------------------------------------------------------------


class CutAttentionOptions(TypedDict, total=False):
    """What `attend` may be told.

    Attributes:
        causal: each token sees itself and those before it.
        documents: int64 [batch, length of the whole sequence], the same on all ranks; tokens of unequal numbers do not
            see each other.
        slots: who holds which tokens; without it `group` is one ring and all ranks hold equally many.
        window: ranks of an inner ring; without it there is one ring.
    """

    causal: bool
    documents: Tensor | None
    slots: SequenceSlots
    window: int


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: RankGroup = None,
    **options: Unpack[CutAttentionOptions],
) -> Tensor:
    """`scaled_dot_product_attention` where each rank holds its slot of the sequences, [batch, heads, tokens, head].

    Exact, and differentiable. All ranks of `group` (None: all ranks) call it alike, with the tokens that
    `SequenceSlots.take` gives them. Key-value heads may be fewer than heads, which they divide.

    Raises UserError for degrees that do not fit the heads or the length.
    """
    size = _size(group)
    causal = options.get("causal", False)
    slots = options.get("slots") or SequenceSlots(query.shape[2] * size, size, causal=causal)
    if slots.causal != causal:
        raise UserError(f"causal = {causal}, but the slots are for causal = {slots.causal}.", do="the same for both")
    if slots.context * slots.heads != size:
        raise UserError(
            f"{slots.context} x {slots.heads} slots are not for a group of {size} ranks.",
            do=f"SequenceSlots(length, context={max(1, size // slots.heads)}, heads={slots.heads})",
        )
    grid = _grid(group, slots, options.get("window", slots.context))
    return grid.attend(query, key, value, slots, options.get("documents"))


_GRIDS: WeakKeyDictionary[Any, dict[tuple[int, int, int], AttentionGrid]] = WeakKeyDictionary()


def _size(group: RankGroup) -> int:
    return dist.get_world_size(group) if group is not None or dist.is_initialized() else 1


def _grid(group: RankGroup, slots: SequenceSlots, window: int) -> AttentionGrid:
    """The grid of a group's ranks, whose subgroups are made once."""
    if slots.context % window:
        near = max(n for n in range(1, min(window, slots.context) + 1) if slots.context % n == 0)
        raise UserError(f"window = {window} does not divide cp = {slots.context}.", do=f"window = {near}")
    if _size(group) == 1:
        alone = (RingRanks(None, 0, 1), RingRanks(None, 0, 1))
        return AttentionGrid(Rings(1, 1), alone, alone)
    whole = group if group is not None else dist.group.WORLD
    key = (slots.context, slots.heads, window)
    grids = _GRIDS.setdefault(whole, {})
    if key not in grids:
        members = dist.get_process_group_ranks(whole)
        slot, head = divmod(dist.get_rank(whole), slots.heads)
        outer, inner = divmod(slot, window)
        rings = Rings(window, slots.context // window, inner, outer)
        ranks = [
            [members[c * slots.heads + head] for c in range(start, stop, step)]
            for start, stop, step in ((outer * window, (outer + 1) * window, 1), (inner, slots.context, window))
        ]
        row = [members[slot * slots.heads + h] for h in range(slots.heads)]
        made = [_new_group(ranks_of_group, whole) for ranks_of_group in (*ranks, *ranks, row)]
        grids[key] = grid_of(rings, (made[0], made[1]), (made[2], made[3]), made[4])
    return grids[key]


def _new_group(ranks: list[int], like: Any) -> RankGroup:
    if len(ranks) < 2:
        return None
    made = dist.new_group(ranks, timeout=getattr(like, "timeout", None), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


Groups = tuple[RankGroup, RankGroup]


def grid_of(rings: Rings, keys: Groups, gradients: Groups, row: RankGroup) -> AttentionGrid:
    """The grid of these (inner, outer) groups."""

    def both(groups: Groups) -> tuple[RingRanks, RingRanks]:
        inner, outer = groups
        return RingRanks(inner, rings.inner, rings.window), RingRanks(outer, rings.outer, rings.windows)

    return AttentionGrid(rings, both(keys), both(gradients), row, 0 if row is None else row.rank())


# --- as a mechanism --------------------------------------------------------------------------------------------------

CLAIM = Claim(
    "loongtrain",
    question="attend",
    needs={"a model"},
    changes={"attention over cut sequences"},
)


class CutAttention(Filled):
    """The ranks of a sequence attend together."""

    seam = "attend"
    claim = CLAIM
    record = "loongtrain"

    def wrap(self, context: Build) -> None:
        """Makes the groups, fills `attend`, and lets what counts tokens of sequences count those of all ranks."""
        self.grid = _grid_of(context.mesh)
        _encode(context.plan, context.mesh, self.grid)
        super().wrap(context)
        assert context.model is not None
        for module, field in fields_of(context.model, "total"):
            setattr(module, field, _total(context.mesh, module))

    def replacement(self, context: Build, module: nn.Module, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Attention over all ranks; the plain one for sequences that a rank has alone (when it generates). Raises
        UserError where the module says that it has fewer `heads` than ranks share them."""
        grid, heads = self.grid, getattr(module, "heads", None)
        if grid.row is not None and heads is not None:
            tensor_ranks = len(context.mesh.mesh.members(context.mesh.rank, "tp"))  # which divide them first
            HeadSplit(max(1, heads[0] // tensor_ranks), max(1, heads[1] // tensor_ranks), grid.row.size())

        def attend(query: Tensor, key: Tensor, value: Tensor, where: Where) -> Any:
            if where.slots is None:
                return plain(query, key, value, where)
            return grid.attend(query, key, value, where.slots, where.documents)

        return torch.compiler.disable(attend)


def _grid_of(mesh: ProcessMesh) -> AttentionGrid:
    at = mesh.coordinates
    members = mesh.mesh.members
    rings = Rings(len(members(mesh.rank, "cp_in")), len(members(mesh.rank, "cp_out")), at.cp_in, at.cp_out)
    keys = mesh.group("cp_in"), mesh.group("cp_out")
    # Groups of their own, as keys may travel on that of all ranks, which sums gradients meanwhile.
    first, second = ((_twin(keys[0]), _twin(keys[1])) for _ in range(2))
    return grid_of(rings, first, second, mesh.group("hp"))


def _twin(group: RankGroup) -> RankGroup:
    return None if group is None else _new_group(dist.get_process_group_ranks(group), group)


def _encode(plan: Plan, mesh: ProcessMesh, grid: AttentionGrid) -> None:
    """Gives heads and rings the codecs that the plan names, by the level of the links they cross."""
    mesh.encode(Traffic.ACTIVATIONS, grid.row, plan)
    for rings in (grid.keys, grid.gradients):
        for ring in rings:
            mesh.encode(Traffic.KEYS_VALUES, ring.group, plan)


def _total(mesh: ProcessMesh, module: nn.Module) -> Callable[[Tensor], Tensor]:
    group = mesh.group("cp_out", "cp_in", "hp")

    def total(counts: Tensor) -> Any:
        if module.training and group is not None:  # a rank may generate by itself
            with traffic(Traffic.CONTROL):
                dist.all_reduce(counts, group=group)
        return counts

    return torch.compiler.disable(total)


def choose(recipe: Recipe, plan: Plan) -> Mechanism | None:
    """Where ranks share a sequence, or it holds several documents: between them nothing is computed. A model whose
    attention is limited keeps documents apart itself."""
    packed = any(data.packing == "documents" for data in recipe.data) and not decoder_shapes.limited(recipe.model)
    return CutAttention() if packed or any(stage.sequence > 1 for stage in plan.stages) else None
