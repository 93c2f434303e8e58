"""Double ring attention: queries stay, keys and values travel round an inner and an outer ring, results are merged.

After LoongTrain (arXiv 2406.18485, section 4.3). Slots form a grid of `W` windows of `w`. A block of keys and values is
passed on inside its window at every step, and unrotated to the next window while these `w` steps run. Backward sends
the gradients of keys and values, always in float32 or wider, on groups of their own: inside a window one step behind
their keys, and between windows while the next window is at work. Deviations: gradients cross each link as often as keys
do, not once more, as what the own window computes stays there; and only keys that a later rank looks at are sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from espalier.comm.base import Traffic, traffic
from espalier.comm.plain_collectives import RankGroup
from espalier.kernels.merge import merge
from espalier.mechanisms.sequence_parallel.block_attention import (
    Saved,
    accumulation,
    block_attention,
    block_attention_backward,
)
from espalier.parallel.attend import CORES
from espalier.parallel.sequence_slots import Block, Bounds, Ranges, SequenceSlots

# --- the schedule ----------------------------------------------------------------------------------------------------


class Rings(NamedTuple):
    """The shape of the two rings, and where one rank stands."""

    window: int
    windows: int
    inner: int = 0
    outer: int = 0

    @property
    def slot(self) -> int:
        """The context slot of this rank."""
        return self.outer * self.window + self.inner

    def owner(self, outer: int, inner: int) -> int:
        """Whose keys are here in step `inner` of window step `outer`."""
        return (self.outer - outer) % self.windows * self.window + (self.inner - inner) % self.window

    def visits(self, owner: int, outer: range, inner: range) -> list[int]:
        """The slots that see the keys of `owner` in these steps."""
        first, second = divmod(owner, self.window)
        return [
            (first + j) % self.windows * self.window + (second + s) % self.window
            for j, s in itertools.product(outer, inner)
        ]


class Visit(NamedTuple):
    """One step of one rank.

    Attributes:
        owner: whose keys are here; blocks: what it computes, for each row of `Bounds`; needs: which keys that takes.
        onward: which keys go on inside the window; passed: which came, after the first step.
        summed: of which keys gradients come from the rank before; sent: of which they go on to the next, after the
            first step.
    """

    owner: int
    blocks: tuple[tuple[Block, ...], ...]
    needs: Ranges
    onward: Ranges
    passed: Ranges
    summed: Ranges
    sent: Ranges


class WindowStep(NamedTuple):
    """The steps of one rank while one window's keys go round.

    Attributes:
        visits: `w` of them.
        onward, passed: keys that go to the next window, and that came for this one.
        summed: of which keys gradients come from the window before; returned: from the end of this one; sent: of which
            they go to the next window (of the first window step: none).
    """

    visits: tuple[Visit, ...]
    onward: Ranges
    passed: Ranges
    summed: Ranges
    returned: Ranges
    sent: Ranges


class RingSchedule(NamedTuple):
    """The `W` window steps of one rank; `home`: of which of its keys gradients come from other windows."""

    steps: tuple[WindowStep, ...]
    home: Ranges


@lru_cache(maxsize=64)
def schedule(slots: SequenceSlots, bounds: Bounds, rings: Rings) -> RingSchedule:
    """What one rank computes, sends and receives, in order."""
    window = rings.window
    windows = rings.windows

    def needed(owner: int, outer: range, inner: range) -> Ranges:
        others = [slot for slot in rings.visits(owner, outer, inner) if slot != owner]
        return slots.needed(owner, others, bounds) if others else ()

    def visit(j: int, s: int) -> Visit:
        owner = rings.owner(j, s)
        whole = ((0, slots.tokens(rings.owner(j, s))),)
        columns = range(j, j + 1)
        blocks = tuple(tuple(slots.blocks(rings.slot, owner, row)) for row in bounds)
        needs = whole if owner == rings.slot else slots.needed(owner, [rings.slot], bounds)
        return Visit(
            owner,
            blocks,
            needs,
            onward=needed(owner, columns, range(s + 1, window)),
            passed=needed(owner, columns, range(s, window)),
            summed=needed(owner, columns, range(1, s)),
            sent=needed(owner, columns, range(1, s + 1)),
        )

    def step(j: int) -> WindowStep:
        owner = rings.owner(j, 0)
        every = range(window)
        return WindowStep(
            visits=tuple(visit(j, s) for s in every),
            onward=needed(owner, range(j + 1, windows), every),
            passed=needed(owner, range(j, windows), every),
            summed=needed(owner, range(1, j), every),
            returned=needed(owner, range(j, j + 1), range(1, window)),
            sent=needed(owner, range(1, j + 1), every),
        )

    home = needed(rings.slot, range(1, windows), range(window))
    return RingSchedule(tuple(step(j) for j in range(windows)), home)


# --- tensors on their way --------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Keys and values, or their gradients: [2, batch, kv_heads, tokens, head], of these `ranges` of a slot."""

    values: Tensor
    ranges: Ranges

    def at(self, start: int, stop: int) -> Tensor:
        """Those of `[start, stop)`, which lies in one range. A view."""
        offset = 0
        for first, last in self.ranges:
            if first <= start and stop <= last:
                return self.values.narrow(3, offset + start - first, stop - start)
            offset += last - first
        raise AssertionError(f"{start}:{stop} is not in {self.ranges}")

    def only(self, ranges: Ranges) -> Held:
        """Those of `ranges`, which must be here."""
        if ranges == self.ranges:
            return self
        return Held(torch.cat([self.values[:, :, :, :0], *(self.at(*span) for span in ranges)], 3), ranges)

    def plus(self, other: Held | None) -> Held:
        """Adds `other`, whose ranges must be here, in place."""
        for span in other.ranges if other is not None else ():
            assert other is not None
            self.at(*span).add_(other.at(*span))
        return self


def _shape(like: Tensor, ranges: Ranges) -> list[int]:
    return [*like.shape[:3], sum(stop - start for start, stop in ranges), like.shape[4]]


class Transfer:
    """A message on its way to the next rank of a ring, and one from the rank before. Has state: their works."""

    def __init__(self, works: Sequence[Any], sent: Held | None, received: Held | None) -> None:
        self._works = works
        self._sent = sent
        self._received = received

    def wait(self) -> Held | None:
        """What came; None where nothing was to come."""
        for work in self._works:
            work.wait()
        self._sent = None
        return self._received


@dataclass(frozen=True, eq=False)
class RingRanks:
    """The ranks of one ring, as one of them sees it. `group`: None where there is one."""

    group: RankGroup
    position: int
    size: int

    def exchange(self, sent: Held | None, like: Tensor | None, ranges: Ranges) -> Transfer:
        """Sends to the next rank and receives `ranges` of something `like` from the one before; what is empty is not
        sent. Even positions send first and odd ones receive first, so a blocking transport cannot deadlock either."""
        works: list[Any] = []
        received: Held | None = None
        sending = sent if sent is not None and sent.ranges else None
        if ranges and like is not None:
            received = Held(like.new_empty(_shape(like, ranges)), ranges)
        for outward in (True, False) if self.position % 2 == 0 else (False, True):
            if outward and sending is not None:
                values = sending.values.contiguous()
                to = (self.position + 1) % self.size
                sending = Held(values, sending.ranges)
                works.append(dist.isend(values, group=self.group, group_dst=to))
            elif not outward and received is not None:
                came = (self.position - 1) % self.size
                works.append(dist.irecv(received.values, group=self.group, group_src=came))
        return Transfer([work for work in works if work is not None], sending, received)


@dataclass(frozen=True, eq=False)
class DoubleRing:
    """Attention over the sequences of the ranks of both rings. Immutable.

    Attributes:
        slots: who holds which tokens; rings: the shape; bounds: the documents of the rows.
        keys, gradients: the (inner, outer) rings that keys and values travel on, and their gradients.
    """

    slots: SequenceSlots
    rings: Rings
    bounds: Bounds
    keys: tuple[RingRanks, RingRanks]
    gradients: tuple[RingRanks, RingRanks]

    @property
    def schedule(self) -> RingSchedule:
        """What this rank does."""
        return schedule(self.slots, self.bounds, self.rings)

    def _visits(self, local: Held) -> Iterator[tuple[int, int, Held | None]]:
        """Every step (window step, step inside it) with the keys that are here; the next are on their way meanwhile."""
        (inner, outer), steps = self.keys, self.schedule.steps
        base: Held | None = local
        for j, step in enumerate(steps):
            coming = steps[j + 1].passed if j + 1 < len(steps) else ()
            between = outer.exchange(base and base.only(step.onward), local.values, coming)
            travelling = base
            for s, visit in enumerate(step.visits):
                coming = step.visits[s + 1].passed if s + 1 < len(step.visits) else ()
                within = inner.exchange(travelling and travelling.only(visit.onward), local.values, coming)
                yield j, s, travelling
                travelling = within.wait()
            base = between.wait()

    def _blocks(self, visit: Visit, travelling: Held | None) -> Iterator[tuple[Any, Block, Tensor, Tensor]]:
        """(rows of the queries, block, keys, values) of everything a visit computes."""
        for number, blocks in enumerate(visit.blocks):
            row = slice(None) if len(visit.blocks) == 1 else slice(number, number + 1)
            for block in blocks:
                assert travelling is not None
                key, value = travelling.at(block.k_start, block.k_stop)[:, row]
                yield (row, slice(None), slice(block.q_start, block.q_stop)), block, key, value

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(out like query, lse [batch, heads, tokens] in float32 or wider)."""
        wide = accumulation(query.dtype)
        out = query.new_zeros(query.shape, dtype=wide)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
        local = Held(torch.stack([key, value]), ((0, key.shape[2]),))
        for j, s, travelling in self._visits(local):
            for rows, block, its_key, its_value in self._blocks(self.schedule.steps[j].visits[s], travelling):
                block_out, block_lse = block_attention(query[rows], its_key, its_value, block.causal)
                if (j, s) == (0, 0) and block_out.shape == out.shape:  # the first of all, and for every query
                    out = block_out.to(wide)
                    lse = block_lse.contiguous()
                else:
                    merge(out[rows], lse[rows], block_out, block_lse)
        return out.to(query.dtype), lse

    def backward(self, gradient: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value."""
        query, key, value, *_ = saved
        local = Held(torch.stack([key, value]), ((0, key.shape[2]),))
        gradient = gradient.contiguous()
        of_query = query.new_zeros(query.shape, dtype=accumulation(query.dtype))
        returning = _Returning(self, local.values.new_empty(local.values.shape, dtype=of_query.dtype))
        for j, s, travelling in self._visits(local):
            visit = self.schedule.steps[j].visits[s]
            made = returning.empty(visit.needs)
            for rows, block, its_key, its_value in self._blocks(visit, travelling):
                saved_block = Saved(query[rows], its_key, its_value, saved.out[rows], saved.lse[rows])
                first, second, third = block_attention_backward(gradient[rows], saved_block, block.causal)
                if (j, s) == (0, 0) and first.shape == of_query.shape:
                    of_query = first.to(of_query.dtype)
                else:
                    of_query[rows] += first
                at = made.at(block.k_start, block.k_stop)[:, rows[0]]
                at[0] += second
                at[1] += third
            returning.add(j, s, made)
        second, third = returning.end().values.to(key.dtype)
        return of_query.to(query.dtype), second, third


class _Returning:
    """The gradients of keys and values on their way home. Has state."""

    def __init__(self, ring: DoubleRing, like: Tensor) -> None:
        self.like = like
        self.schedule = ring.schedule
        self.rings = ring.gradients
        self.within = self.between = Transfer((), None, None)
        self.home = self.mine = self.empty(())

    def empty(self, ranges: Ranges) -> Held:
        """Zeros for the keys in `ranges`."""
        return Held(self.like.new_zeros(_shape(self.like, ranges)), ranges)

    def add(self, j: int, s: int, made: Held) -> None:
        """Takes what a step has `made`: passes it on with what came, or keeps it while its window is at work."""
        step = self.schedule.steps[j]
        if s:
            total = self.empty(step.visits[s].sent).plus(self.within.wait()).plus(made)
            coming = step.visits[s + 1].summed if s + 1 < len(step.visits) else step.returned
            self.within = self.rings[0].exchange(total, self.like, coming)
        elif j:
            self._close(j - 1)
            self.mine = made
        else:
            self.home = made

    def _close(self, j: int) -> None:
        """Sends what a window step has added up to the next window; of the first step these are our own keys."""
        steps = self.schedule.steps
        if not j:
            self.home.plus(self.within.wait())
            self.within = Transfer((), None, None)
            return
        total = self.empty(steps[j].sent).plus(self.between.wait()).plus(self.within.wait()).plus(self.mine)
        coming = steps[j + 1].summed if j + 1 < len(steps) else self.schedule.home
        self.between = self.rings[1].exchange(total, self.like, coming)
        self.within = Transfer((), None, None)

    def end(self) -> Held:
        """Of this rank's own keys, once everything has come."""
        self._close(len(self.schedule.steps) - 1)
        return self.home.plus(self.between.wait())


# --- as one operation of autograd ------------------------------------------------------------------------------------

_ALIVE: WeakValueDictionary[int, DoubleRing] = WeakValueDictionary()
# Not `torch.library.custom_op`: its first call imports a second of torch's compiler.
_LIBRARY = torch.library.Library("espalier", "FRAGMENT")
_LIBRARY.define("ring_attention(Tensor query, Tensor key, Tensor value, int ring) -> (Tensor, Tensor)")


@torch.library.impl(_LIBRARY, "ring_attention", "CompositeExplicitAutograd")
def _forward(query: Tensor, key: Tensor, value: Tensor, ring: int) -> tuple[Tensor, Tensor]:
    with traffic(Traffic.KEYS_VALUES):
        return _ALIVE[ring].forward(query, key, value)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ring = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.ring = _ALIVE[ring]  # keeps it alive


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    with traffic(Traffic.KEYS_VALUES):
        return *ctx.ring.backward(gradient, Saved(*ctx.saved_tensors)), None


torch.library.register_autograd("espalier::ring_attention", _gradients, setup_context=_setup, lib=_LIBRARY)

CORE = torch.ops.espalier.ring_attention.default
CORES.append(CORE)


def ring_attention(ring: DoubleRing, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of this rank's queries over the keys and values of all ranks of `ring`: [batch, heads, tokens, head].
    All of them must call it. Under autocast it computes in autocast's dtype, as PyTorch's attention does."""
    if query.dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        low = torch.get_autocast_dtype(query.device.type)
        query = query.to(low)
        key = key.to(low)
        value = value.to(low)
    _ALIVE[id(ring)] = ring
    return CORE(query, key, value, id(ring))[0]
