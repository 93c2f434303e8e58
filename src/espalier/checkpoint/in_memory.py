"""In-memory checkpoints: the state of a few steps ago, in memory that outlives the rank. A restart reads them first.

After Acme (arXiv 2403.07648), section 6.1, and Gemini (SOSP 2023). Where we deviate: a copy belongs to the ranks of
one run as they are now (same plan, same number), so each rank keeps its own part as it lies in memory, without a
format or a file; over several machines another rank keeps it too, where states are cut (`peer_copy`). Two copies take
turns (a rank alone has one); one is taken only where every rank has it whole, by its hash. Where all ranks hold the
same state, one that has no copy, as it was started in place of another, is sent that of a rank that stayed.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from espalier.checkpoint import divergence_check, peer_copy, state_tree, young_daly
from espalier.checkpoint import shared_memory as refuges
from espalier.checkpoint.base import StatefulParts
from espalier.checkpoint.coordination import Coordinator
from espalier.checkpoint.divergence_check import Alike, Digest
from espalier.checkpoint.peer_copy import Partner
from espalier.checkpoint.save_and_restore import Checkpoints, Loaded
from espalier.checkpoint.shared_memory import SharedMemory
from espalier.checkpoint.young_daly import Interval
from espalier.recipe import serialization
from espalier.recipe.errors import UserError

_HEADER = struct.Struct("<qqq16s")  # step, where the skeletons begin, where they end, XXH3-128 of all between
_BEGIN = 4096
_ALIGNED = 64
_NONE = -1
_KEPT = 0.8
"""How much of the usual step's time stays at each new one."""

Agree = Callable[[Tensor], None]
"""Replaces a vector by its mean over all ranks, in place."""


class _Row(NamedTuple):
    """Where a tensor's local part lies; `whole`: the shape of the tensor that it is of. It travels as a tuple."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    whole: tuple[int, ...]


_Copies = tuple[dict[int, Digest], list[int], bool]
"""Of one rank: a digest of each whole copy by its step, the steps it keeps for another, and whether it stayed."""


class CopySlot:
    """One copy. Has state: the mapping of its file."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._map: mmap.mmap | None = None

    @property
    def step(self) -> int:
        """Of the copy, whole or not; -1 where there is none."""
        return self._header()[0]

    def good(self) -> bool:
        step, _, end, digest = self._header()
        size = os.fstat(self.file).st_size
        return step >= 0 and _BEGIN <= end <= size and digest == self._digest(end)

    def clear(self) -> None:
        if os.fstat(self.file).st_size:
            _HEADER.pack_into(self._mapped(), 0, _NONE, 0, 0, b"")

    def write(self, step: int, tensors: state_tree.KeptTensors, rest: Any) -> None:
        """Copies the local parts of `tensors`, and `rest` (plain values). Killed on the way, it leaves no copy."""
        self.clear()
        rows, end = _layout(tensors)
        tail = serialization.dumps(([tuple(row) for row in rows], rest), "a copy in memory")
        self._reach(end + len(tail))
        memory = self._mapped()
        room = torch.frombuffer(memory, dtype=torch.uint8)
        for row in rows:
            _view(room, row).copy_(state_tree.local(tensors[row.name]))
        memory[end : end + len(tail)] = tail
        digest = self._digest(end + len(tail))
        _HEADER.pack_into(memory, 0, step, end, end + len(tail), digest)

    def content(self, size: int | None = None) -> Tensor:
        """[size] the whole copy as it is now; with `size`, room for one that is to come."""
        if size is not None:
            self._reach(size)
        return torch.frombuffer(self._mapped(), dtype=torch.uint8)[: self._header()[2] if size is None else size]

    def read(self) -> tuple[dict[_Row, Tensor], Any]:
        """The local parts, as views of the copy, and the rest. Raises UserError: it holds what `write` does not."""
        _, begin, end, _ = self._header()
        memory = self._mapped()
        content = serialization.loads(memory[begin:end], "A copy in memory")
        room = torch.frombuffer(memory, dtype=torch.uint8)[:begin]
        try:
            rows, rest = content
            return {row: _view(room, row) for row in (_Row(*row) for row in rows)}, rest
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UserError("A copy in memory cannot be read.", why=f"{type(error).__name__}: {error}") from None

    def _header(self) -> tuple[int, int, int, bytes]:
        if os.fstat(self.file).st_size < _BEGIN:
            return _NONE, 0, 0, b""
        step, begin, end, digest = _HEADER.unpack_from(self._mapped(), 0)
        return step, begin, end, digest

    def _digest(self, end: int) -> bytes:
        with memoryview(self._mapped()) as whole, whole[_BEGIN:end] as part:
            return xxhash.xxh3_128_digest(part)

    def _reach(self, size: int) -> None:
        if os.fstat(self.file).st_size < size:
            self._map = None  # views of the smaller one may live on
            os.ftruncate(self.file, size + size // 8)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            self._map = mmap.mmap(self.file, os.fstat(self.file).st_size)
        return self._map


def _layout(tensors: state_tree.KeptTensors) -> tuple[list[_Row], int]:
    """Where each tensor goes, and where the last one ends."""
    rows = []
    first = _BEGIN
    for name, tensor in tensors.items():
        local = state_tree.local(tensor)
        rows.append(_Row(name, local.dtype, tuple(local.shape), first, tuple(tensor.shape)))
        first += -(-local.nbytes // _ALIGNED) * _ALIGNED
    return rows, first


def _view(room: Tensor, row: _Row) -> Tensor:
    if min(row.shape, default=0) < 0 or row.first < _BEGIN:
        raise ValueError(f"{row.name} lies nowhere")
    count = torch.Size(row.shape).numel() * row.dtype.itemsize
    return room[row.first : row.first + count].view(row.dtype).view(row.shape)


@dataclass(frozen=True)
class CopyOptions:
    """What a rank can take from others.

    Attributes:
        stays: `alike`: all ranks hold the same state, so each can take another's copy; `rounds`: each can begin as
            another is, its parts being those of the other in their order; empty: neither.
        stayed: this rank stayed when another was lost; only then is a replica begun as another.
        apart: how far away the rank is that keeps copies too (`peer_copy`); 0: there is none.
        alike: asked before a copy is made whether all ranks still hold the same.
    """

    stays: str = ""
    stayed: bool = False
    apart: int = 0
    alike: Alike | None = None


class Memory:
    """This rank's copies, and when the next one is due. Has state: the copies, and what they and the steps take.

    Args:
        refuge: where they lie.
        team: the ranks, as for checkpoints.
        tell: called with the interval whenever it was decided anew, or with why there are no copies.
        kin: whose copies else it may take.
    """

    def __init__(
        self, refuge: SharedMemory, team: Coordinator, tell: Callable[[int, str], None], kin: CopyOptions | None = None
    ) -> None:
        kin = kin or CopyOptions()
        slots = [CopySlot(file) for file in refuge.files]
        self._slots = slots[: refuges.SLOTS]
        others = slots[refuges.SLOTS :]
        self._partner = Partner(team, others, kin.apart) if kin.apart and others else None
        self._kept = len(self._slots) * (1 if self._partner is None else 2)
        self._refuge, self._team, self._tell, self._stays = refuge, team, tell, kin.stays
        self._stayed = kin.stayed or kin.stays == "alike"
        self._alike = kin.alike
        self._due = 0
        self._steps = 0
        self._usual = 0.0
        self._last: tuple[int, float] | None = None
        self._off = False
        self._copies = 0
        self._allowed: int | None = None
        self._newest = _NONE

    def after(self, step: int, parts: Callable[[], StatefulParts], meta: Mapping[str, Any], agree: Agree) -> None:
        """Copies the state after `step` steps, if one is due. All ranks call it after the same steps. Raises what
        `alike` does, with nothing copied."""
        if self._off:
            return
        self._clock(step)
        if step < self._due:
            return
        began = time.perf_counter()
        tensors, skeletons = state_tree.flatten(parts())
        if self._alike is not None:
            self._alike.compare(tensors)
        fits = self._fits(tensors)
        if fits:
            self._oldest().write(step, tensors, (skeletons, dict(meta)))
            self._newest = step
        if self._partner is not None and self._copies:  # all ranks have room, as they told after the first one
            self._partner.pass_on(next(slot for slot in self._slots if slot.step == self._newest))
        measured = torch.tensor([time.perf_counter() - began, self._usual, float(not fits)], dtype=torch.float64)
        agree(measured)
        self._decide(step, *measured.tolist())
        self._last = (step, time.perf_counter())

    def stay(self, step: int, parts: Callable[[], StatefulParts], meta: Mapping[str, Any]) -> None:
        """Copies the state as it is, where another rank can take it up: one was lost, and this one stays."""
        spoilt = self._alike is not None and not self._alike.good
        if not self._stays or self._off or spoilt or step <= max(self._newest, 0):
            return
        tensors, skeletons = state_tree.flatten(parts())
        if self._fits(tensors):
            self._oldest().write(step, tensors, (skeletons, dict(meta)))

    def _fits(self, tensors: state_tree.KeptTensors) -> bool:
        if self._allowed is None:
            # Only now, when everything that training needs has been taken.
            self._allowed = self._refuge.allowed()
        return self._kept * _layout(tensors)[1] <= self._allowed

    def _oldest(self) -> CopySlot:
        return min(self._slots, key=lambda slot: (slot.step == self._newest, slot.step))

    def newest(self) -> int:
        """The newest step of which every rank has a whole copy, its own or one that it can be sent; -1 when there is
        none. Where all should hold the same, a step of which they have kept different copies does not count. All ranks
        call it."""
        partner = self._partner

        def local_copies() -> _Copies:
            digests = {slot.step: self._digest(slot) for slot in self._slots if slot.good()}
            return digests, [] if partner is None else sorted(partner.stored_steps()), self._stayed

        def combine(given: list[_Copies]) -> list[int]:
            seen: dict[int, set[Digest]] = {}
            for step, digest_ in itertools.chain.from_iterable(owns.items() for owns, _, _ in given):
                seen.setdefault(step, set()).add(digest_)
            copies = [{step for step in owns if len(seen[step]) == 1} for owns, _, _ in given]
            if partner is not None:
                copies = [steps.union(given[partner.keeps(rank)][1]) for rank, steps in enumerate(copies)]
            there = set.union(*copies) if any(stayed for *_, stayed in given) else set.intersection(*copies)
            return [max(there, default=_NONE)] * len(given)

        return self._team.agree("looking for copies in memory", local_copies, combine)

    def _digest(self, slot: CopySlot) -> Digest:
        """Of the tensors of a whole copy, where ranks are compared."""
        if self._alike is None:
            return ()
        return divergence_check.digest({row.name: part for row, part in slot.read()[0].items()}, self._alike.besides)

    def take(self, step: int, parts: StatefulParts) -> dict[str, Any] | None:
        """Gives `parts` their state of `step`; what was said of it, or None (and nothing done) where it does not fit.
        All ranks call it."""
        slot = next((slot for slot in self._slots if slot.step == step), None)
        if self._stays or self._partner is not None:
            slot = self._shared(step)
        states: list[dict[str, Any]] = []
        meta: dict[str, Any] = {}

        def fill() -> bool:
            if slot is None:
                return False
            rows, (skeletons, saved_meta) = slot.read()
            filled = _filled(rows, state_tree.flatten(parts)[0])
            if filled is None:
                return False
            meta.update(saved_meta)
            trees = [
                serialization.loads(skeleton, f"The state of {name!r} in memory")
                for name, skeleton in skeletons.items()
            ]
            states.extend(state_tree.join(tree, filled.__getitem__) for tree in trees)
            return True

        if not self._team.agree("fitting copies", fill, lambda all_: [all(all_)] * len(all_)):
            return None
        for part, state in zip(parts.values(), states, strict=True):
            part.load_state_dict(state)
        return meta

    def _shared(self, step: int) -> CopySlot | None:
        """This rank's copy of `step`; where it has none, one that another rank has sent. None where that did not arrive
        whole, by its hash."""
        slot = next((slot for slot in self._slots if slot.step == step and slot.good()), None)
        team = self._team
        partner = self._partner
        having = team.agree("sharing copies", lambda: slot is not None, lambda all_: [all_] * len(all_))
        for rank in (rank for rank, has in enumerate(having) if not has):
            source = having.index(True) if partner is None else partner.keeps(rank)
            if team.rank == source:
                copy = slot if partner is None else partner.copy(step)
                assert copy is not None
                peer_copy.send(team, copy, rank)
            elif team.rank == rank:
                slot = self._oldest()
                peer_copy.receive(team, slot, source)
        return slot if slot is not None and slot.good() else None

    def begin(self, step: int) -> None:
        """The run goes on from `step`: copies of later steps are of an attempt that is given up."""
        for slot in self._slots:
            if slot.step > step:
                slot.clear()
        if self._partner is not None:
            self._partner.begin(step)
        self._newest = max((slot.step for slot in self._slots), default=_NONE)
        self._due = step + 1
        self._last = None

    def _clock(self, step: int) -> None:
        now = time.perf_counter()
        if self._last is not None and step > self._last[0]:
            took = (now - self._last[1]) / (step - self._last[0])
            self._usual = _KEPT * self._usual + (1 - _KEPT) * took if self._usual else took
        self._last = (step, now)

    def _decide(self, step: int, stall: float, usual: float, crowded: float) -> None:
        if crowded:
            self._off = True
            for slot in self._slots:
                slot.clear()
            self._tell(0, f"no copies in memory: {self._kept} of them take more than faults.memory allows a rank "
                          f"({self._allowed:,} bytes)")  # fmt: skip
            return
        self._copies += 1
        if self._copies <= len(self._slots):
            self._due = step + 1  # the first use of a slot maps its pages: no measure of what copies cost
            return
        interval: Interval = young_daly.interval(stall, usual, self._refuge.between_failures)
        self._due = step + interval.steps
        if usual and not 0.5 <= interval.steps / max(1, self._steps) <= 2.0:
            self._steps = interval.steps
            self._tell(interval.steps, f"a copy in memory {interval}")


def _filled(rows: Mapping[_Row, Tensor], tree: state_tree.KeptTensors) -> dict[str, state_tree.Kept] | None:
    """The parts' own tensors with what was kept; copies where a part has none yet; None where they differ."""
    filled: dict[str, state_tree.Kept] = {}
    for row, value in rows.items():
        name = row.name
        mine = tree.get(row.name)
        if mine is None and row.whole != row.shape:
            return None
        if mine is None:
            filled[name] = value.clone()
            continue
        room = state_tree.local(mine)
        if room.shape != value.shape or room.dtype != value.dtype:
            return None
        room.copy_(value)
        filled[name] = mine
    return filled


def salvage(copies: Sequence[SharedMemory], saved: Checkpoints) -> int:
    """Saves the newest whole copy, where every rank holds the whole state, no rank runs any more and no checkpoint is
    as new. Its step; -1 where there is nothing to save."""
    slots = [slot for copy in copies for slot in map(CopySlot, copy.files[: refuges.SLOTS]) if slot.good()]
    newest = max(slots, key=lambda slot: slot.step, default=None)
    if newest is None or newest.step <= max(0, saved.newest()):
        return _NONE
    parts, (skeletons, meta) = newest.read()
    meta.pop("report", None)  # the rank that logs lives where this is done
    tensors = {row.name: part.view(row.whole) for row, part in parts.items()}
    whole: Any = {
        name.removeprefix(state_tree.SKELETON): SimpleNamespace(
            state_dict=partial(state_tree.join, serialization.loads(skeleton, name), tensors.__getitem__)
        )
        for name, skeleton in skeletons.items()
    }
    saved.save(newest.step, whole, meta, wait=True)
    return newest.step


def take_up(
    memory: Memory | None, saved: Checkpoints, parts: StatefulParts, most: int | None = None
) -> tuple[Loaded | None, str]:
    """Restores `parts` from the newest good state, in memory or on disk; and where that was, in words.

    With `most`, from the newest on disk of at most so many steps: copies in memory are too young to be trusted then.
    """
    if memory is None or most is not None:
        loaded = saved.load(parts, most=most)
        if memory is not None:
            memory.begin(loaded.step if loaded else 0)
        return loaded, "disk" if loaded else ""
    newest = memory.newest()
    disk = saved.newest()
    if newest > 0 and newest >= disk:
        meta = memory.take(newest, parts)
        if meta is not None:
            memory.begin(newest)
            return Loaded(newest, meta, [], []), f"memory (the newest on disk is of step {max(0, disk)})"
    loaded = saved.load(parts)
    memory.begin(loaded.step if loaded else 0)
    there = f"the newest in memory is of step {newest}" if newest > 0 else "nothing whole is in memory"
    return loaded, f"disk ({there})" if loaded else ""
