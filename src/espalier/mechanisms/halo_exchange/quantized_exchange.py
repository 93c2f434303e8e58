"""Sylvie: rows of boundary nodes cross with few bits, and most of them one step late. After arXiv 2303.01277.

A `Sylvie` is the transport of a `Halo`. Each peer gets one message for each layer and direction: a stamp (the step,
layer and direction, which the receiver compares), then rows of 1 to 8 bits (`kernels.quantize_rows`), or of 32 as they
are. Of narrow rows for one peer some share a scale, which would take more bytes than their codes. In a synchronous step
a rank waits for the rows of this step; in others it takes those that each peer sent so many steps before as its age
says (0: in this step), whose flight was hidden behind these steps. Gradients travel likewise.

Deviations from the authors: the first step of a run is synchronous instead of reading zeros; a checkpoint holds the
messages that later steps read (with other parts or options, the first step after it is synchronous too); scales are
bfloat16 and codes are made with the rounded ones; the receiver takes the random numbers of rounding off again, which
the key of a message gives it (subtractive dither: a variance of S^2 / 12); no rule reads a clock.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from espalier.checkpoint.base import StateDict
from espalier.comm.base import Traffic, traffic
from espalier.graph.networks.gnn import Gnn
from espalier.graph.parts import halo
from espalier.graph.parts.halo import Arrival, Crossing, ForeignRows, Halo, degree_shares, not_finite
from espalier.graph.sampling.neighbor_sampler import stream
from espalier.graph.tasks.loss_speed import LossTuner
from espalier.kernels import quantize_rows as kernels
from espalier.kernels import row_widths
from espalier.mechanisms.halo_exchange.halo_bits import Key
from espalier.recipe import units
from espalier.recipe.errors import RESUME, Corrupted, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from espalier.mechanisms.halo_exchange.options import HaloOptions

TOO_FEW = "few bits between a smallest and a largest value cannot say that"
WHOLE = 32
"""As bits: values cross as they are."""
_STAMP = struct.Struct("<IHBB")
"""Before the rows of a message: the step, the layer, the direction and the bits."""
STAMP = _STAMP.size
"""Its bytes."""
NARROW = 64
"""Values from which on a row has a scale of its own; of narrower rows as many share one as have so many values."""


class Choice(NamedTuple):
    """What one step does: whether it waits for fresh rows, and the bits of a value (of the least important rows)."""

    synchronous: bool
    bits: int


class Every(NamedTuple):
    """The Bounded Staleness Adaptor: every `synchronize`-th step is synchronous, with the same bits in all.

    `synchronize`: 1: all steps are; 0: none after the first.
    """

    bits: int = WHOLE
    synchronize: int = 1

    def next(self, step: int) -> Choice:
        """Of the step that comes after `step` steps."""
        return Choice(self.synchronize > 0 and (step + 1) % self.synchronize == 0, self.bits)


LEAST_BITS = 1
MOST_BITS = 8
BITS_RULE, LATE_RULE = "graph.halo.bits", "graph.halo.late"
"""In plans and logs: the time and execution rules of Sylvie's later version. Late: 1, rows may be; 0: none are."""


class Adaptive(LossTuner):
    """Bits and lateness that follow the speed at which the loss changes: a `track.decision_log.Controller`. Has state.

    Where the average of losses moves ever less from step to step (`loss_speed`), progress slows: bits double, and all
    steps wait for fresh rows. Where it moves ever more, bits halve, and rows are late within `synchronize`. What is
    decided depends on the losses alone, so that the log of a run says why.
    """

    def __init__(self, bits: int, synchronize: int) -> None:
        super().__init__()
        self.bits = bits
        self.synchronize = synchronize
        self.late = True

    @property
    def values(self) -> dict[str, int]:
        return {BITS_RULE: self.bits, LATE_RULE: int(self.late)}

    def next(self, step: int) -> Choice:
        return Every(self.bits, self.synchronize if self.late else 1).next(step)

    def turned(self, recorded: Mapping[str, int]) -> Adaptive:
        """The next step begins."""
        change = self.coming
        self.coming = 0
        if change < 0:
            self.bits = min(MOST_BITS, 2 * self.bits)
            self.late = False
        elif change > 0:
            self.bits = max(LEAST_BITS, self.bits // 2)
            self.late = True
        self.bits, self.late = recorded.get(BITS_RULE, self.bits), bool(recorded.get(LATE_RULE, self.late))
        return self

    def state_dict(self) -> StateDict:
        return {"bits": self.bits, "late": self.late, **super().state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self.bits = state.get("bits", self.bits)
        self.late = state.get("late", self.late)
        super().load_state_dict(state)


StalenessPolicy = Every | Adaptive
"""Which steps wait for fresh rows, and with how many bits rows cross. All ranks decide alike."""


def sharing(columns: int) -> int:
    """How many rows of so many values share a scale."""
    return max(1, NARROW // max(1, columns))


class _Layout(NamedTuple):
    """Where rows lie in the messages of one crossing: by group its bits and place, by peer the bytes of its message.

    Attributes:
        rows, groups: of each peer.
        order: int64 [groups, rows of a group], which rows a group has; the last row for a peer fills up its last group.
            None: every row is a group.
        places: int64 [rows], where each row is in `order`, flat.
    """

    widths: Tensor
    begins: Tensor
    splits: list[int]
    rows: list[int]
    groups: list[int]
    order: Tensor | None = None
    places: Tensor | None = None

    def grouped(self, rows: Tensor) -> Tensor:
        """Rows [rows, columns] as [groups, columns of a group]."""
        if self.order is None:
            return rows
        groups, together = self.order.shape
        return rows[self.order.flatten()].view(groups, together * rows.shape[1])

    def alone(self, groups: Tensor) -> Tensor:
        """What `grouped` was given."""
        if self.order is None:
            return groups
        return groups.view(self.order.numel(), groups.shape[1] // self.order.shape[1])[self.places]

    def row(self, group: int, values: Tensor) -> int:
        """The first row of a group whose values are not finite; the first of all where none is."""
        if self.order is None:
            return group
        bad = ~values.view(self.order.shape[1], -1).isfinite().all(1)
        return int(self.order[group, int(bad.int().argmax())])

    @property
    def stamps(self) -> list[int]:
        """Where messages begin; those without rows have no stamp."""
        ends = np.cumsum(self.splits)
        return [int(end) - size for end, size in zip(ends, self.splits, strict=True) if size]


class _Flight(NamedTuple):
    """Messages under way. `works` are waited for, by peer; `outgoing` is kept until they have left."""

    works: list[list[Any]]
    outgoing: Tensor
    arriving: Tensor
    layout: _Layout
    step: int
    bits: int

    def wait(self, peers: Iterable[int]) -> None:
        """For messages to and from these; Gloo's can be waited for once."""
        for works in (self.works[peer] for peer in peers):
            while works:
                works.pop().wait()


class ByPeer(NamedTuple):
    """What differs between peers.

    Attributes:
        bits: for a crossing those of the rows for each rank, and of those from each, in place of the policy's: 1 to 8,
            or `WHOLE` for all of that crossing; None: the policy's.
        ages: how many steps old each peer's rows may be where a step is not synchronous: its bound of staleness. Then a
            message to or from one peer waits for no other. None: one step, in one collective for all.
    """

    bits: Callable[[Crossing], tuple[Sequence[int], Sequence[int]]] | None = None
    ages: Sequence[int] | None = None


class Sylvie:
    """The transport: see the module. Has state: the step, and the messages of the steps before.

    Args:
        policy: which steps are synchronous, and with how many bits.
        delta: both ends keep the rows as they last arrived, and what crosses is the difference to these, rounded to the
            nearest code, so that what rounding lost is sent with the next step (error feedback): the error of rows that
            do not change shrinks by about 2^bits a step (at 8 by 2^7).
        by_degree: rows of nodes with more neighbours get more bits (see `kernels.row_widths`); else all get as many.
        peers: what differs between them.
        seed: of the random numbers.
    """

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        by_degree: bool = False,
        delta: bool = False,
        peers: ByPeer | None = None,
        seed: int = 0,
    ) -> None:
        self.policy, self.by_degree, self.delta, self.seed = policy, by_degree, delta, seed
        self.peers, self.ages = peers or ByPeer()
        self.step = 0
        self.choice = Choice(True, policy.bits)
        self._flights: dict[tuple[int, bool, torch.dtype], list[_Flight]] = {}
        self._saved: dict[tuple[int, bool, torch.dtype], list[tuple[int, int, Tensor]]] = {}
        self._sent: dict[Key, Tensor] = {}
        self._arrived: dict[tuple[int, bool, int], tuple[int, Tensor]] = {}
        self._layouts: dict[tuple[Crossing, bool, int, int, int], _Layout] = {}
        self._shares: tuple[Tensor, Tensor] | None = None

    def begin(self, step: int) -> None:
        """Before the forward pass that comes after `step` steps. Where steps were left out or are made anew, the rows
        of the step before are not there, and this one is synchronous."""
        if step != self.step + 1:
            self.drain()
        self.step, self.choice = step, self.policy.next(step)

    def drain(self) -> None:
        """Waits for what is under way and drops it."""
        self._wait()
        self._flights, self._saved, self._sent, self._arrived = {}, {}, {}, {}

    def _wait(self) -> None:
        for flight in (flight for flights in self._flights.values() for flight in flights):
            flight.wait(range(len(flight.works)))

    def state_dict(self) -> StateDict:
        """What later steps read of earlier ones: messages that may still be used, and what differences are added to.
        Waits for those under way; all ranks call it after the same step."""
        self._wait()
        saved = {
            key: [(flight.step, flight.bits, flight.arriving) for flight in flights]
            for key, flights in self._flights.items()
        }
        return {"step": self.step, "saved": saved, "sent": self._sent, "arrived": self._arrived}

    def load_state_dict(self, state: StateDict) -> None:
        """Takes back what `state_dict` gave, on ranks of the same parts."""
        self.step, self._saved, self._sent, self._arrived = state.values()

    def __call__(self, halo: Halo, sent: Tensor, received: Tensor, crossing: Crossing) -> Arrival:
        """See `halo.Transport`. Raises UserError for rows that are not finite, by layer and node, and for rows that
        crossed in this step already; and Corrupted for a message of another step, layer, direction or width, or of rows
        that are older than they may be."""
        if self.by_degree and self._shares is None and sent.is_floating_point():
            self._shares = degree_shares(halo)
        key = (*crossing, sent.dtype)
        peers = range(len(halo.receives))
        if key not in self._flights:
            self._flights[key] = []
            for step, bits, arriving in self._saved.get(key, ()):
                layout = self._layout(halo, received, crossing, bits, leaves=False)
                self._flights[key].append(_Flight([[] for _ in peers], arriving, arriving, layout, step, bits))
        if any(flight.step == self.step for flight in self._flights[key]):
            raise UserError(
                f"{_what(crossing)} crossed in step {self.step} already.",
                why="each layer exchanges its rows once in a step; these would arrive as those of the first time",
                do=f"transport.begin({self.step + 1}) before the next forward pass, or halo.synchronous",
            )
        flights = [*self._flights[key], self._launch(halo, sent, received, crossing)]
        ages = [0 if self.choice.synchronous else 1 if self.ages is None else self.ages[peer] for peer in peers]
        steps = [flight.step for flight in flights]
        used = [next(at for at, step in enumerate(steps) if step >= self.step - age) for age in ages]
        self._flights[key] = [flight for flight in flights[:-1] if flight.step > self.step - max(ages)] + flights[-1:]

        def arrive() -> None:
            for at, flight in enumerate(flights):
                flight.wait([peer for peer in peers if at <= used[peer]])
            self._read([flights[: at + 1] for at in used], received, crossing, ages)

        return arrive

    def _launch(self, halo: Halo, sent: Tensor, received: Tensor, crossing: Crossing) -> _Flight:
        bits = self._bits(crossing) if sent.is_floating_point() else WHOLE
        out = self._layout(halo, sent, crossing, bits, leaves=True)
        back = self._layout(halo, received, crossing, bits, leaves=False)
        wire, arriving = (torch.empty(sum(layout.splits), dtype=torch.uint8) for layout in (out, back))
        for begin in out.stamps:
            wire[begin : begin + STAMP] = _stamp(self.step, crossing, bits)
        if bits == WHOLE:
            _copy(out, sent, wire)
        else:
            rows = out.grouped(sent.detach().float().flatten(1).cpu())
            if self.delta:
                known = self._sent.setdefault((*crossing,), torch.zeros_like(rows))
                rows = rows - known
            first = 0
            key = self._key(self.step, crossing, halo.rank)
            for count in out.groups:  # rows are numbered in each message: who receives one makes its random numbers too
                group_rows = slice(first, first + count)
                every = torch.arange(count)
                bad = kernels.quantize_rows(
                    rows[group_rows], every, out.widths[group_rows], (out.begins[group_rows], wire), key
                )
                if bad >= 0:
                    raise not_finite(halo, crossing, out.row(first + bad, rows[first + bad]), TOO_FEW)
                first += count
            if self.delta:
                kernels.restore_rows(wire, out.begins, out.widths, rows)
                known += rows
        with traffic(Traffic.HALO):
            if self.ages is None:
                work = dist.all_to_all_single(arriving, wire, back.splits, out.splits, group=halo.group, async_op=True)
                works: list[list[Any]] = [[work], *([] for _ in out.splits[1:])]
            else:
                works = _messages(halo, wire.split(out.splits), arriving.split(back.splits), crossing)
        return _Flight(works, wire, arriving, back, self.step, bits)

    def _key(self, step: int, crossing: Crossing, sender: int) -> int | None:
        """Of the random numbers of a message; None: its rows are differences, whose codes are the nearest."""
        if self.delta:
            return None
        return (stream(self.seed, step, 2 * crossing.layer + crossing.backward) + sender) & 0xFFFF_FFFF

    def _bits(self, crossing: Crossing) -> int:
        """Of the stamp of messages with floating-point rows."""
        if self.peers is None:
            return self.choice.bits
        return WHOLE if any(WHOLE in widths for widths in self.peers(crossing)) else self.choice.bits

    def _layout(self, halo: Halo, rows: Tensor, crossing: Crossing, bits: int, leaves: bool) -> _Layout:
        """Of rows that cross for, or (not `leaves`) from, this rank."""
        columns = int(np.prod(rows.shape[1:]))
        size = columns * rows.element_size() if bits == WHOLE else columns
        alike = crossing if self.peers is not None else crossing._replace(layer=0)
        counts = each_peer = halo.leaving(crossing) if leaves else halo.arriving(crossing)
        known = (alike, leaves, size, bits, sum(counts))
        if known not in self._layouts:
            order = None
            places = None
            if bits != WHOLE and self._shares is None and (together := sharing(columns)) > 1:
                order, places = _groups(counts, together)
                counts = [-(-count // together) for count in counts]
                columns = columns * together
            if bits != WHOLE and self.peers is not None:
                peer_bits = self.peers(crossing)[0 if leaves else 1]
                widths = torch.tensor(peer_bits, dtype=torch.uint8).repeat_interleave(torch.tensor(counts))
            else:
                widths = self._widths(crossing.backward == leaves, sum(counts), bits)
            each = torch.full((sum(counts),), size) if bits == WHOLE else kernels.wire_bytes(columns, widths.long())
            splits = [int(row_sizes.sum()) + STAMP * bool(len(row_sizes)) for row_sizes in each.split(counts)]
            stamped = torch.tensor([count > 0 for count in counts]).cumsum(0)  # stamps up to this peer's
            before = torch.repeat_interleave(stamped, torch.tensor(counts), output_size=sum(counts))
            begins = each.cumsum(0) - each + STAMP * before
            self._layouts[known] = _Layout(widths, begins, splits, each_peer, counts, order, places)
        return self._layouts[known]

    def _widths(self, backward: bool, rows: int, bits: int) -> Tensor:
        if bits == WHOLE or self._shares is None:
            return torch.full((rows,), bits, dtype=torch.uint8)
        return torch.from_numpy(row_widths.widths_of(bits, self._shares[backward].numpy()))

    def _read(self, arrived: list[list[_Flight]], received: Tensor, crossing: Crossing, ages: list[int]) -> None:
        """`arrived`: the last messages of each peer, whose rows are those of the latest, or (differences) of all."""
        newest = arrived[0][-1]
        flat = received.flatten(1)
        layout = newest.layout
        whole = newest.bits == WHOLE
        plain = received.dtype == torch.float32 and received.device.type == "cpu" and received.is_contiguous()
        columns = flat.shape[1] * (1 if layout.order is None else layout.order.shape[1])
        into = whole or (plain and layout.order is None)
        rows = flat if into else torch.empty(len(layout.widths), columns)
        outs = rows.split(layout.rows if whole else layout.groups)
        for peer, (flights, out, age) in enumerate(zip(arrived, outs, ages, strict=True)):
            for flight in flights if self.delta and not whole else flights[-1:]:
                message = flight.arriving.split(flight.layout.splits)[peer]
                if not len(message):
                    continue
                old = _checked(message[:STAMP], flight, crossing, peer, self.step)
                if flight is flights[-1] and old > age:
                    raise Corrupted(
                        f"{_what(crossing)} of rank {peer} are {units.plural(old, 'step')} old in step {self.step}.",
                        why=f"they may be {units.plural(age, 'step')} old",
                        do=RESUME,
                    )
                if whole:
                    out.copy_(message[STAMP:].clone().view(received.dtype).view(out.shape))
                else:
                    self._restore(flight, (crossing, peer), out)
        if not into:
            received.copy_(layout.alone(rows).view(received.shape))

    def _restore(self, flight: _Flight, source: tuple[Crossing, int], out: Tensor) -> None:
        """The groups of rows of a peer. Of differences each message counts once."""
        first = sum(flight.layout.groups[: source[1]])
        layout = flight.layout
        group_rows = slice(first, first + len(out))
        if not self.delta:
            key = self._key(flight.step, *source)
            kernels.restore_rows(flight.arriving, layout.begins[group_rows], layout.widths[group_rows], out, key)
            return
        name = (*source[0], source[1])
        step, arrived = self._arrived.get(name, (-1, torch.zeros(out.shape)))
        if flight.step > step:
            more = torch.empty_like(arrived)
            kernels.restore_rows(flight.arriving, layout.begins[group_rows], layout.widths[group_rows], more)
            self._arrived[name] = flight.step, arrived.add_(more)
        out.copy_(arrived)


def _messages(halo: Halo, out: Sequence[Tensor], into: Sequence[Tensor], crossing: Crossing) -> list[list[Any]]:
    """Begins a message to and from each peer; by peer what is to be waited for."""
    group = halo.group
    tag = 2 * crossing.layer + crossing.backward
    assert group is not None, "rows cross between ranks"
    works: list[list[Any]] = [
        [group.recv([buffer], peer, tag)] if len(buffer) else [] for peer, buffer in enumerate(into)
    ]
    for peer, message in enumerate(out):
        works[peer] += [group.send([message], peer, tag)] if len(message) else []
    return works


def _groups(counts: list[int], together: int) -> tuple[Tensor, Tensor]:
    """See `_Layout`, of rows for each peer."""
    order, places, first, slot = [], [], 0, 0
    for count in counts:
        groups = -(-count // together)
        order.append((first + torch.arange(groups * together).clamp(max=count - 1)).view(groups, together))
        places.append(slot + torch.arange(count))
        first = first + count
        slot = slot + groups * together
    return torch.cat(order), torch.cat(places)


def _stamp(step: int, crossing: Crossing, bits: int) -> Tensor:
    return torch.frombuffer(bytearray(_STAMP.pack(step, *crossing, bits)), dtype=torch.uint8)


def _checked(stamp: Tensor, flight: _Flight, crossing: Crossing, peer: int, now: int) -> int:
    """How many steps before step `now` a message was sent that begins with `stamp` (uint8 [STAMP]). Raises
    Corrupted where it is not the one that is awaited."""
    if not torch.equal(stamp, _stamp(flight.step, crossing, flight.bits)):
        raise Corrupted(
            f"A message of rank {peer} in step {now} is {_said(stamp)}, where "
            f"{_what(crossing).lower()} of step {flight.step} with {flight.bits} bits a value were to come.",
            why="ranks that are not in the same step, layer and direction would mix their rows",
            do=RESUME,
        )
    return now - flight.step


def _what(crossing: Crossing) -> str:
    return f"{'Gradients' if crossing.backward else 'Rows'} for layer {crossing.layer + 1}"


def _said(stamp: Tensor) -> str:
    """A stamp in words."""
    step, layer, backward, bits = _STAMP.unpack(stamp.numpy().data)
    return f"{_what(Crossing(layer, bool(backward))).lower()} of step {step} with {bits} bits a value"


def _copy(layout: _Layout, rows: Tensor, wire: Tensor) -> None:
    """Rows as they are to their places behind the stamps."""
    flat = rows.detach().flatten(1)
    for message, peer_rows in zip(wire.split(layout.splits), flat.split(layout.rows), strict=True):
        if len(message):
            message[STAMP:].copy_(peer_rows.contiguous().view(torch.uint8).flatten())


def row_bytes(columns: int, bits: Any, size: int = 4) -> Any:
    """Bytes of a boundary row of so many values of `size` bytes on the wire."""
    return np.where(np.equal(bits, WHOLE), columns * size, kernels.wire_bytes(columns, bits))


# --- cost ------------------------------------------------------------------------------------------------------------


def step_bytes(
    network: Gnn | ForeignRows,
    rows: Any,
    options: HaloOptions,
    size: int = 4,
    by_peer: Mapping[Key, Any] | None = None,
) -> Any:
    """float [ranks, ranks]: payload bytes that each rank sends each other in a step, forward and backward together: the
    ledger's row `halo`.

    Args:
        network: whose layers exchange; rows: `halo.Boundary.rows`; options: of `[graph.halo]`; size: bytes of a value.
        by_peer: int [ranks, ranks] for each crossing, bits of the rows that rank i sends rank j; None: those of
            `options` (of rows that have codes none, which take the bits of `[quant]` whatever is said here).
    """
    assert options.bits != "auto" or by_peer is not None, "the plan has the bits"
    bits: dict[Key, Any] = dict.fromkeys(crossings(network), WHOLE if by_peer else options.bits)
    bits.update(by_peer or {})
    plain = options.synchronize == 1 and all(
        (np.asarray(crossing_bits) == WHOLE).all() for crossing_bits in bits.values()
    )
    sent = np.zeros(np.shape(rows))
    for key, chosen in bits.items():
        for width in np.unique(chosen):
            sent = sent + np.where(
                chosen == width, crossing_bytes(network, rows, options, key, Values(int(width), size, plain)), 0
            )
    return sent


def crossings(network: Gnn | ForeignRows) -> list[Crossing]:
    """All of a step, in order of layers."""
    return [Crossing(at, backward) for at in range(1, halo.depth(network)) for backward in (False, True)]


class Values(NamedTuple):
    """How the values of a crossing are sent: with so many `bits`, of `size` bytes otherwise; `plain`: as they are,
    without stamps."""

    bits: int
    size: int = 4
    plain: bool = False


def crossing_bytes(network: Gnn | ForeignRows, rows: Any, options: HaloOptions, key: Key, values: Values) -> Any:
    """float [ranks, ranks]: of one crossing all of whose rows are sent alike; see `step_bytes`."""
    bits, size, plain = values
    at, back = key
    forward, backward = halo.row_bytes(network, at, size)
    count = np.asarray(rows).T if back else np.asarray(rows)
    if not back and (coded := halo.crossing_codes(network, at, size)) is not None:
        return (count + coded.steps * (count > 0)) * coded.bytes + STAMP * (not plain) * (count > 0)
    if plain:
        return count * (backward if back else forward)
    selects = isinstance(network, Gnn) and network.options.activation == "maxk" and not back
    column_bytes = forward - backward if selects else 0  # columns of kept values
    columns = backward // size
    by_degree = options.by_degree and bits != WHOLE
    together = 1 if by_degree or bits == WHOLE else sharing(columns)
    rows = np.ceil(count / together).astype(np.int64)
    widths = row_widths.by_degree(bits, rows) if by_degree else row_widths.uniform(bits, rows)
    each = partial(row_bytes, columns * together, size=size)
    return widths.total(each) + count * column_bytes + STAMP * (1 + selects) * (count > 0)
