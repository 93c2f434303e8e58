"""What sharded states cost: seconds, bytes held, bytes sent, of many layouts in one call. NumPy; no torch.

The search and the plan that runs ask the same functions. Lengths are those of the very units that are exchanged
(`plan.axes.flat_layout`), padding included, so that bytes sent are the ledger's; the formulas are AMSP's (arXiv
2311.00257,
sections 2.4 and 2.5). Of a model that is cut, or whose tensors are not known, all parameters count as one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from espalier.plan.axes.flat_layout import BUCKET, Arranged, BucketRule, Piece, PieceStream, arrange, streams
from espalier.plan.axes.placement import Placement, ShardFactors, inside, level, place
from espalier.plan.axes.placement_plan import LOSSLESS, PIPED, groups
from espalier.plan.axes.state_holders import nested
from espalier.recipe.cost import Cost, Number, Terms, ring_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from espalier.plan.axes.flat_layout import Sized

GRADIENTS = "gradients"
PARAMETERS = "parameters"
FEEDBACK_BYTES = 4
"""Of what a lossy codec has not sent yet, per parameter: float32 at least."""

MOST_CODES = 2**62
"""So many integers tell layouts apart at most."""

Wire = Callable[[Any, Number, Number, Number, str], Number]
"""(operation, bytes of the whole tensor, ranks, their distance, class of traffic) -> seconds of a collective."""


class StateBytes(NamedTuple):
    """Bytes of each parameter by state: as computed with, its gradient, and what the optimizer keeps (masters too)."""

    params: Number
    grads: Number
    optimizer: Number

    def times(self, factor: float) -> StateBytes:
        """Of values that are wider or narrower by a factor."""
        return self if factor == 1 else StateBytes(*(value * factor for value in self))


@dataclass(frozen=True, eq=False)
class StateSizes:
    """A model's states as far as their cost depends on them. Numbers may be arrays, one value for each layout.

    Attributes:
        storage: bytes of a parameter; exact: of one that keeps its precision beside low ones, None: the same.
        sizes: the trainable tensors in the model's order (or frozen ones); empty: not known.
        trained: whether they have gradients, and are moved.
        fetched: whether layers come from host memory one by one, on however many ranks they are sharded.
        tensors: those of a rank, by the `cuts` of the model (stages, runs of layers on each rank, ranks to a matrix);
            None: `sizes`.
        whole: matrices lie on one rank each (an optimizer of matrices moves them).
        elements, layers, layer: trainable parameters of a rank before sharding, its layers, parameters of one layer.
        outside: parameters outside the layers, in tables of `table`; tied: the head has the embedding's.
        cut: whether a rank has less than the whole model, so that `elements` counts and not `sizes`.
        largest: elements of the largest matrix that stays whole.
        width: bytes of a value that `storage` is meant for.
        bucket_bytes: as in `Spread`.
        lossy: the level (`inside`, `between`, `all`) at which sums of gradients are rounded; empty: at none.
    """

    storage: StateBytes
    exact: StateBytes | None = None
    sizes: Sequence[Sized] = ()
    trained: bool = True
    fetched: bool = False
    tensors: Callable[[int, int, int], Lengths] | None = None
    cuts: tuple[Number, ...] = ()
    whole: bool = False
    elements: Number = 0
    layers: Number = 1
    layer: Number = 0
    outside: Number = 0
    table: Number = 0
    tied: Any = 0
    cut: Any = False
    largest: Number = 0
    width: int = 4
    bucket_bytes: Any = BUCKET
    lossy: str = ""


@dataclass(frozen=True, eq=False)
class Division:
    """Over how many ranks each state is split. Every field may be an array [n].

    Attributes:
        ranks: that hold the same part of the model; stride: how far they are apart.
        machine: how many of them are on one machine, where exchanges go through machines first; None: they do not.
    """

    params: Any = 1
    grads: Any = 1
    optimizer: Any = 1
    ranks: Any = 1
    stride: Any = 1
    machine: Any = None

    @property
    def each(self) -> Any:
        """Ranks between two machine borders that exchanges heed."""
        return self.ranks if self.machine is None else np.maximum(1, self.machine)

    @property
    def by_level(self) -> Any:
        """Whether exchanges go through machines and then between them: see `Placement`."""
        return (self.each > 1) & (self.each < self.ranks)

    def of_experts(self, ep: int) -> Division:
        """That of experts which groups of `ep` ranks divide among them: see `plan.axes.state_holders`."""
        ranks = np.maximum(1, self.ranks // ep)  # pipelines of unlike depth may have fewer
        machine = None if self.machine is None else self.machine // ep
        factors = nested(ShardFactors(self.params, self.grads, self.optimizer), ranks)
        return replace(self, **factors._asdict(), ranks=ranks, stride=self.stride * ep, machine=machine)

    @property
    def multiple(self) -> Any:
        """What lengths are multiples of: see `Placement.multiple`."""
        replicas = self.ranks // self.optimizer
        inner = inside(replicas, self.optimizer, self.each)
        return self.optimizer * np.where((inner > 1) & (inner < replicas), inner, 1)


class Volume(NamedTuple):
    """Units of one storage taken together. Arrays allowed.

    Attributes:
        elements: of all of them, padding included; units: how many they are.
        staying, staying_units: of those that stay from forward to backward where parameters are gathered.
    """

    storage: StateBytes
    elements: Number
    units: Number
    staying: Number = 0
    staying_units: Number = 0


class GroupTraffic(NamedTuple):
    """What one group of ranks exchanges in a step: `size` bytes of whole tensors in so many `calls`.

    `part`: `gather` and `scatter` belong to every micro-batch, `reduce` and `refresh` to the step.
    """

    part: str
    traffic: str
    operation: str
    size: Number
    calls: Number
    ranks: Number
    stride: Number


# --- lengths -----------------------------------------------------------------------------------------------------


class Units(NamedTuple):
    """Units of one kind: lengths, which stay from forward to backward, and how many of each there are, all [units]."""

    low: bool
    element_bytes: int
    lengths: NDArray[Any]
    stays: NDArray[Any]
    times: NDArray[Any]


class Rules(NamedTuple):
    """What the units of a model must obey: whether parameters are `gathered` by blocks, what lengths are multiples of,
    among how many `owners` whole matrices are dealt, and the bytes of a bucket (of a block 0)."""

    gathered: bool
    multiple: int
    owners: int
    limit: int

    @property
    def rule(self) -> BucketRule:
        """The same of each group."""
        return BucketRule(*self[1:])


class Lengths:
    """The units of a model by their rules. Has state: those that were worked out."""

    def __init__(self, sizes: Sequence[Sized], whole: bool) -> None:
        self.sizes, self.whole = sizes, whole
        self._known: dict[Rules, tuple[Units, ...]] = {}
        self._totals: dict[Rules, dict[tuple[bool, int], tuple[int, int, int, int]]] = {}
        self._streams: dict[tuple[bool, bool], list[PieceStream]] = {}

    def of(self, rules: Rules) -> tuple[Units, ...]:
        if rules.owners > 1:  # whole pieces are dealt anew for other owners
            return self._cached(rules)
        kinds = self._cached(rules._replace(multiple=1))
        return tuple(units._replace(lengths=-(-units.lengths // rules.multiple) * rules.multiple) for units in kinds)

    def totals(self, rules: Rules) -> dict[tuple[bool, int], tuple[int, int, int, int]]:
        """By precision and bytes of an element: elements, units, and those of them that stay."""
        if rules not in self._totals:
            self._totals[rules] = {(units.low, units.element_bytes): _sums(units) for units in self.of(rules)}
        return self._totals[rules]

    def _cached(self, rules: Rules) -> tuple[Units, ...]:
        if rules not in self._known:
            self._known[rules] = self._kinds(rules)
        return self._known[rules]

    def _kinds(self, rules: Rules) -> tuple[Units, ...]:
        kind_of_pieces = rules.gathered, rules.owners > 1
        if kind_of_pieces not in self._streams:
            self._streams[kind_of_pieces] = streams(self._pieces(*kind_of_pieces))
        members = self._streams[kind_of_pieces]
        last = max((stream.group.gathered[1] for stream in members if stream.group.gathered), default=0)
        kinds: dict[tuple[bool, int], list[tuple[int, bool, int]]] = {}
        for stream in members:
            gathered = stream.group.gathered
            kind = (stream.group.kind[1], stream.element_bytes)
            stays = gathered is not None and (gathered[0] is None or gathered[1] == last)
            rows = [(length, stays, times) for _, _, length, times in stream.cuts(rules.rule)]
            kinds.setdefault(kind, []).extend(rows)
        return tuple(Units(*kind, *map(np.array, zip(*rows, strict=True))) for kind, rows in kinds.items())

    def _pieces(self, gathered: bool, dealt: bool) -> list[Piece]:
        sizes = self.sizes
        shards = ShardFactors(params=2 if gathered else 1)
        of = groups([shards] * len(sizes), [sized.block for sized in sizes], [sized.kind for sized in sizes])
        return [
            Piece(sized.elements, sized.element_bytes, group, self.whole and sized.matrix and dealt, sized.copies)
            for sized, group in zip(sizes, of, strict=True)
        ]

    def arranged(self, rules: Rules) -> list[Arranged]:
        return arrange(self._pieces(rules.gathered, rules.owners > 1), lambda group: rules.rule)


@lru_cache(maxsize=1024)
def lengths(sizes: tuple[Sized, ...], whole: bool) -> Lengths:
    """Of a model's tensors: those worked out are kept."""
    return Lengths(sizes, whole)


@lru_cache(maxsize=8)
def volumes(states: StateSizes, division: Division) -> Sequence[Volume]:
    """The lengths of all layouts, by storage. Those of the last states are kept: bytes and seconds ask for them."""
    if not states.sizes and states.tensors is None:
        return [_even(states, division)]
    exact = _arranged(states, division)
    if not np.any(states.cut):
        return exact
    even = _even(states, division)
    return [*exact, Volume(even.storage, *(np.where(states.cut, value, 0) for value in even[1:]))]


def _arranged(states: StateSizes, division: Division) -> list[Volume]:
    """By the units themselves; nothing of layouts that cut the model."""
    owners = division.optimizer if states.whole else 1
    gathered = (np.asarray(division.params) > 1) | states.fetched  # by blocks, whatever their bytes
    limit = np.where(division.by_level, np.minimum(states.bucket_bytes, PIPED), states.bucket_bytes) * ~gathered
    known = lengths(tuple(() if states.tensors else states.sizes), states.whole)
    of_rank = states.tensors or (lambda *cuts: known)
    cut, *columns = np.broadcast_arrays(states.cut, gathered, division.multiple, owners, limit, *states.cuts)
    rows, at = _alike(np.stack(columns).reshape(len(columns), -1) * ~cut.reshape(-1))
    table = [of_rank(*row[4:]).totals(Rules(bool(row[0]), *row[1:4])) if row[1] else {} for row in rows.tolist()]
    by_kind = []
    for kind in dict.fromkeys(kind for totals in table for kind in totals):
        sums = np.array([totals.get(kind, (0, 0, 0, 0)) for totals in table])
        storage = states.storage if kind[0] or states.exact is None else states.exact
        shaped = (sums[at, column].reshape(cut.shape) for column in range(4))
        by_kind.append(Volume(storage.times(kind[1] / states.width), *shaped))
    return by_kind


def _alike(columns: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The columns that differ [m, rows], and which of them each column is [n]."""
    code = np.zeros(columns.shape[1], dtype=np.int64)
    codes = 1
    for column in columns if columns.shape[1] else ():
        least = column.min()
        values = int(column.max() - least) + 1
        if codes * values > MOST_CODES:
            code = np.unique(code, return_inverse=True)[1]
            codes = int(code.max()) + 1
        code = code * values + (column - least)
        codes = codes * values
    _, first, at = np.unique(code, return_index=True, return_inverse=True)
    return columns[:, first].T, at


def _sums(units: Units) -> tuple[int, int, int, int]:
    stay = units.times * units.stays
    return int(units.times @ units.lengths), int(units.times.sum()), int(stay @ units.lengths), int(stay.sum())


def _even(states: StateSizes, division: Division) -> Volume:
    """As if all parameters were one length; a whole matrix makes every owner's share as long as itself."""
    gathered = division.params > 1
    limit = np.where(division.by_level, np.minimum(states.bucket_bytes, PIPED), states.bucket_bytes)
    wanted = np.maximum(states.elements, states.largest * (division.optimizer > 1) * division.optimizer)
    elements = np.ceil(np.ceil(wanted) / division.multiple) * division.multiple
    buckets = np.maximum(1, np.ceil(elements * states.storage.grads / limit))
    staying = np.minimum(elements, states.outside + states.layer)
    blocks = states.layers + (states.outside > 0)
    return Volume(
        states.storage, elements, np.where(gathered, blocks, buckets), staying, np.minimum(2, blocks) * (staying > 0)
    )


# --- cost --------------------------------------------------------------------------------------------------------


def cost(states: StateSizes, division: Division, *, rounds: Number = 1, wire: Wire | None = None) -> Cost:
    """What sharded states add to a step of each rank.

    Args:
        states, division: of many layouts, as arrays that broadcast together.
        rounds: micro-batches of the step.
        wire: how long collectives take; None: no seconds.

    Returns:
        `memory_bytes`: `params`, `grads`, `optimizer`, `gathered`, `buckets` and, where sums are rounded, `feedback`.
        `sent`: the ledger's bytes of `gradients` and `parameters`, nothing encoded (see `wire_bytes`).
        `seconds`, nothing hidden: `gather` (sharded parameters) and `scatter` (sharded gradients) of all micro-batches,
        `reduce` (the step's gradients) and `refresh` (moved parameters).
    """
    state_volumes = volumes(states, division)
    seconds: dict[str, Number] = {}
    sent: dict[str, Number] = {GRADIENTS: 0.0, PARAMETERS: 0.0}
    for exchange in exchanges(state_volumes, division, rounds):
        if not states.trained and exchange.part != "gather":
            continue
        sent[exchange.traffic] = sent[exchange.traffic] + ring_bytes(exchange.operation, exchange.size, exchange.ranks)
        if wire is not None:
            calls = np.maximum(1, exchange.calls)
            taken = calls * wire(
                exchange.operation, exchange.size / calls, exchange.ranks, exchange.stride, exchange.traffic
            )
            seconds[exchange.part] = seconds.get(exchange.part, 0.0) + taken
    return Cost(seconds=seconds, memory_bytes=memory_bytes(states, division, state_volumes), sent=sent)


def exchanges(state_volumes: Sequence[Volume], division: Division, rounds: Number = 1) -> Iterator[GroupTraffic]:
    """Everything that a step sends of `state_volumes`. Axes that go on from one another count as one: in all a rank
    sends the bytes of one flat collective (see `plan.axes.placement`)."""
    params = division.params
    grads = division.grads
    optimizer = division.optimizer
    stride = division.stride
    replicas = division.ranks // optimizer
    for volume in state_volumes:
        size = volume.elements * volume.storage.grads
        back = volume.elements * volume.storage.params
        units = volume.units
        gathered = 2 * back - volume.staying * volume.storage.params
        times = 2 * units - volume.staying_units
        yield GroupTraffic("gather", PARAMETERS, "all_gather", rounds * gathered, rounds * times, params, stride)
        yield GroupTraffic("scatter", GRADIENTS, "reduce_scatter", rounds * size, rounds * units, grads, stride)
        away = (optimizer // grads, stride * grads)
        yield GroupTraffic("reduce", GRADIENTS, "reduce_scatter", size / grads, units, *away)
        yield GroupTraffic("reduce", GRADIENTS, "all_reduce", size / optimizer, units, replicas, stride * optimizer)
        home = (optimizer // params, stride * params)
        yield GroupTraffic("refresh", PARAMETERS, "all_gather", back / params, units, *home)


def memory_bytes(states: StateSizes, division: Division, state_volumes: Sequence[Volume]) -> Terms:
    """Bytes on a rank by kind (AMSP, section 2.4): the states, where these are sharded two whole layers of parameters
    and of gradients on their way (the one at work and the next) and what is outside the layers, which stays from
    forward to backward, gradients in buckets, and what codecs keep back."""
    params = division.params
    grads = division.grads
    whole = [sum(volume.storage[state] * volume.elements for volume in state_volumes) for state in range(3)]
    layers = 2 * states.layer
    storage = states.storage
    gathered = np.where((params > 1) | states.fetched, (layers + states.outside) * storage.params, 0.0)
    gathered = gathered + np.where(grads > 1, np.maximum(layers, states.outside) * storage.grads, 0.0)
    summed = whole[1] / grads
    result = {
        "params": whole[0] / params,
        "grads": summed,
        "optimizer": whole[2] / division.optimizer,
        "gathered": gathered,
        "buckets": np.where(division.ranks > grads, np.minimum(2 * states.bucket_bytes, summed), 0.0),
    }
    if states.lossy:
        rounds_off = division.ranks > (division.each if states.lossy == "between" else 1)
        feedback = sum(np.maximum(FEEDBACK_BYTES, volume.storage.grads) * volume.elements for volume in state_volumes)
        result["feedback"] = rounds_off * feedback
    return result


def passing(states: StateSizes, division: Division, staged: bool) -> dict[str, tuple[Number, Number]]:
    """Bytes that a rank holds beside its states, at most: of gathered parameters and of gradients, by moment of a step.

    Gathered are the tables, the layer at work and the next one; of gradients a layer (or a bucket) is filled, and
    another (or two) on their way.

    Args:
        states, division: see `cost`; `staged`: what Gloo sends lies beside where it goes (NCCL works in place).

    Returns:
        `next`: the end of a later micro-batch's forward pass; the backward passes of the `loss`, of the `head`, of the
        `last` layer, of a `layer` before it, and of the `table`; the `update`.
    """
    params, grads, optimizer = division.params, division.grads, division.optimizer
    each, layer, table, layers = states.storage, states.layer, states.table, states.layers
    total = sum(volume.elements for volume in volumes(states, division))
    bucket = states.bucket_bytes / each.grads
    unit = np.minimum(total, np.maximum(bucket, table))
    way = np.minimum(2 * bucket, total)
    rest = np.minimum(2 * bucket, total - unit)
    sent = 1 + staged * (1 + 1 / grads)  # as it lies, as it comes, and the sum
    shares = staged * (grads == 1) * ((optimizer > 1) | division.by_level) * (1 + 1 / optimizer)
    near = states.outside + layer
    ahead = (1 + staged) * layer
    apart = (1 - states.tied) * table
    sharded = params > 1
    moved = staged * (optimizer > params) * each.params / params
    cast = (optimizer > 1) * (each.params < states.width) * states.width / optimizer  # for masters
    rows = {  # gathered; gradients scattered by blocks, by buckets, not scattered, and fresh ones
        "next": (near, sent * table, sent * way, 0, 0),
        "loss": (near, 0, 0, 0, 0),
        "head": (near, apart, unit, 0, table),
        "last": (near + (layers > 1) * ahead, layer + sent * apart, unit + sent * rest, rest, table - apart),
        "layer": (
            near + (layers > 2) * ahead,
            layer + (1 + division.by_level) * sent * layer,
            unit + sent * rest,
            rest,
            table - apart,
        ),
        "table": (states.outside, table + sent * layer, sent * way, way, table),
        "update": (0, 0, 0, 0, (moved + cast) * total / each.grads),
    }
    return {
        moment: (
            sharded * gathered * each.params,
            ((grads > 1) * np.where(sharded, blocks, buckets) + shares * whole + fresh) * each.grads,
        )
        for moment, (gathered, blocks, buckets, whole, fresh) in rows.items()
    }


def refreshed(states: StateSizes, division: Division) -> Number:
    """Bytes of bringing moved parameters back to everybody, once."""
    traffic = exchanges(volumes(states, division), division)
    return sum(
        ring_bytes(exchange.operation, exchange.size, exchange.ranks)
        for exchange in traffic
        if exchange.part == "refresh"
    )


# --- one layout ---------------------------------------------------------------------------------------------------


def owned(
    sizes: Sequence[Sized], whole: bool, chosen: ShardFactors, nodes: Sequence[int], bucket_bytes: int = BUCKET
) -> list[int]:
    """Elements that the optimizer of the first rank moves, tensor by tensor in its order."""
    elements = [sized.elements for sized in sizes for _ in range(sized.copies)]
    if len(nodes) == 1:
        return elements
    moved = []
    _, rules = placed(chosen, nodes, whole, bucket_bytes)
    for unit in lengths(tuple(sizes), whole).arranged(rules):
        end = unit.length // chosen.optimizer
        for index, offset in zip(unit.indices, unit.offsets, strict=True):
            if offset < end:
                moved.append(min(offset + elements[index], end) - offset)
    return moved


def placed(chosen: ShardFactors, nodes: Sequence[int], whole: bool, bucket_bytes: int) -> tuple[Placement, Rules]:
    """Where the factors lie on ranks of these machines, and what units then obey."""
    placement = place(chosen, nodes)
    limit = min(bucket_bytes, PIPED) if placement.by_level else bucket_bytes
    gathered = chosen.params > 1
    return placement, Rules(gathered, placement.multiple, chosen.optimizer if whole else 1, 0 if gathered else limit)


# --- through codecs ------------------------------------------------------------------------------------------------


Codecs = Mapping[tuple[str, str], str]
"""Names of codecs by class of traffic and level, as in `plan.axes.placement_plan.Spread`."""


def wire_bytes(
    states: StateSizes, chosen: ShardFactors, nodes: Sequence[int], codecs: Codecs, *, rounds: int = 1
) -> dict[str, float]:
    """Bytes sent in a step by the first rank, which sends most, through `codecs`, headers included: exact for codecs of
    fixed length and finite values, else at most that.

    Args:
        states: with `sizes`; chosen: the factors of one layout; nodes: the machine of each rank.
        codecs: as in `Spread`.
        rounds: micro-batches of the step.
    """
    placement, rules = placed(chosen, nodes, states.whole, int(states.bucket_bytes))
    sent = {GRADIENTS: 0.0, PARAMETERS: 0.0}
    for units in lengths(tuple(states.sizes), states.whole).of(rules):
        storage = states.storage if units.low or states.exact is None else states.exact
        storage = storage.times(units.element_bytes / states.width)
        before = units.lengths
        for index, axis in enumerate(placement.axes):
            where = level(nodes, axis.members(0))
            sums = Way(codecs.get((GRADIENTS, where)), axis.size, float(storage.grads))
            replicas = axis.state == "replicas"
            kind = GRADIENTS if replicas else PARAMETERS
            back = Way(codecs.get((kind, where)), axis.size, float(storage.grads if replicas else storage.params))
            if replicas and index == len(placement.axes) - 1:
                sent[GRADIENTS] += float(units.times @ sums.sent("all_reduce", before))
            else:
                once = axis.state in ("optimizer", "replicas")
                sent[GRADIENTS] += (1 if once else rounds) * float(units.times @ sums.sent("reduce_scatter", before))
                times = rounds * (2 - units.stays) if axis.state == "params" else 1
                sent[kind] += float((units.times * times) @ back.exact.sent("all_gather", before))
            before = before // axis.size
    return sent


class Way(NamedTuple):
    """How one axis is sent along: by a codec, to so many ranks, values of so many bytes."""

    name: str | None
    ranks: int
    width: float

    @property
    def exact(self) -> Way:
        """The same without rounding."""
        from espalier.comm.codecs import codec

        lossy = self.name is not None and not codec(self.name).lossless
        return self._replace(name=LOSSLESS) if lossy else self

    def sent(self, operation: str, elements: Any) -> Any:
        """Bytes of tensors of so many elements; small ones go as they are."""
        from espalier.comm import compressed_collectives
        from espalier.comm.codecs import codec

        plain = ring_bytes(operation, elements * self.width, self.ranks)
        if self.name is None:
            return plain
        chosen = codec(self.name)
        coded = compressed_collectives.sent_bytes(chosen, operation, elements, (0, self.ranks), int(self.width))
        each = elements * self.width / (self.ranks if operation == "all_to_all" else 1)
        return np.where(each < compressed_collectives.SMALL, plain, coded)
