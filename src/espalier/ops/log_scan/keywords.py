"""Keywords of failures in log lines: which lines hold one, in a plain form for one line and a fast one for a block.

A shape is a line's letters alone, in lower case. The fast form mixes every four letters in a row to sixteen bits, looks
up whether a word begins so, and compares words with the text, sixteen letters at a time, only where one may begin: a
few passes in compiled code, whatever the text holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LINES = """
rror xception traceback fail fatal panic abort kill signal sigterm sigkill sigsegv sigbus crash cancel xid nvrm
nvlink doublebit eccunc uncorrect machinecheck hardware asyncevent linkdown linkflap linkfail portdown ibv netib
timeout timedout timelimit expired refused reset closed unreachable noroute resolution resolve notknown brokenpipe
lost denied nospace quota stale readonly oom outofmemory exhausted ncclwarn remoteprocess preempt requeue notready
notresponding evicted drained draining segmentation coredumped buserror illegal corrupt truncated mismatch missing
unexpected invalid unrecognized unknown unable cannot couldnot cantopen notfound nosuch notdefined nomodule notexist
overflow nonfinite notfinite isnan isinf nangrad nanin infin ornan orinf infnan naninf lossnan nanloss foundnan
nandetected nanencountered encounterednan diverge exploding exploded spike anomaly cableerror portmodule linkstatus
linkis wentdown isdown definitelydown carrier flap exited exitcode exitstatus returncode nonzero terminat usage
requiredarg arerequired nooption override notinstruct rootcause firstobserved excluded shutdown heartbeat barrier
enqueued unavailable deadline slowdown throttl forbidden finished completed successfully trainingdone
trainingcomplete stopped maxsteps pyline assert fallen dataloader worker(pid sharedmemory disconnect interrupt
giveup givingup exceed dead hang hung stuck stall watchdog undefinedsymbol
gated restricted unauthor notauthor credential login license licence quota ratelimit toomany outofrange outofbounds
tooold insufficient notcompatible incompatib notsupported unsupported nokernel nodriver noversion reclaim evicting
overheat criticaltemp overtemp thermalshut thermaltrip readonlyfile
"""
WORDS = tuple(sorted({word.replace("(", "").encode() for word in _LINES.split()}))


_UPPER = bytes(range(65, 91))
_OTHERS = bytes(sorted(set(range(256)) - set(_UPPER) - set(_UPPER.lower()) - {10}))
_LOWER = bytes.maketrans(_UPPER, _UPPER.lower())

WIDE = 16
"""Letters that are compared at once: as many as the longest word has."""
SLICE = 1 << 18
"""Letters looked at together: what is computed of them stays in a core's cache."""
_MIX = 0x9E37
"""Odd, so that letters that differ are mixed to numbers that differ; 2^16 over the golden ratio spreads them."""


def shapes(lines: bytes) -> bytes:
    """`lines` without anything but letters, in lower case, and line feeds."""
    return lines.translate(_LOWER, _OTHERS)


def matters(shape: bytes) -> bool:
    """Whether a line of this shape could matter: the plain form."""
    return any(word in shape for word in WORDS)


def ends_and_matters(text: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the shapes in `text`, each ended by a line feed, end, and the numbers from 0 of those that matter."""
    letters = np.frombuffer(text + b"\n" * WIDE, np.uint8)
    ends = np.flatnonzero(letters[: len(text)] == 10)
    marked = np.zeros(len(ends), np.bool_)
    for at in range(0, len(text), SLICE):
        for begins in _words(letters[at : at + SLICE + WIDE]):
            marked[np.searchsorted(ends, begins + at)] = True
    return ends, np.flatnonzero(marked)


def _words(letters: NDArray[np.uint8]) -> Iterator[NDArray[np.int64]]:
    """Where words begin, but in the last 16 letters. A word may be told under any of those that begin at one place."""
    table = _table(WORDS)
    codes = (letters & 31).astype(np.uint16)
    pairs = codes[:-1] * 32 + codes[1:]
    keys = (pairs[:-2] * _MIX + pairs[2:])[: len(letters) - WIDE]
    places = np.flatnonzero(table.begins.take(keys))
    groups = table.group.take(keys.take(places))
    eights = np.ndarray((len(letters) - 7,), "<u8", letters, strides=(1,))
    halves = eights[places]
    for word in table.words:
        hits = np.flatnonzero((halves & word.first_mask.take(groups)) == word.first.take(groups))
        maybe = places.take(hits)
        group = groups.take(hits)
        yield maybe.compress((eights[maybe + 8] & word.last_mask.take(group)) == word.last.take(group))
        left = np.flatnonzero(word.more.take(groups))
        if not len(left):
            return
        places = places.take(left)
        groups = groups.take(left)
        halves = halves.take(left)


class _WordFinder(NamedTuple):
    """A word of each group: its first and last eight letters as numbers, each with a mask of those that it has, and
    whether the group has further words: [groups]."""

    first_mask: NDArray[np.uint64]
    first: NDArray[np.uint64]
    last_mask: NDArray[np.uint64]
    last: NDArray[np.uint64]
    more: NDArray[np.bool_]


class _KeywordTable(NamedTuple):
    """The words by what their first four letters are mixed to: [2^16]; a group are those mixed to the same."""

    begins: NDArray[np.bool_]
    group: NDArray[np.uint8]
    words: tuple[_WordFinder, ...]


@cache
def _table(words: tuple[bytes, ...]) -> _KeywordTable:
    """A word that holds another is not needed. A word of three letters has any fourth."""
    mixed: dict[int, set[bytes]] = {}
    for word in words:
        if not any(other in word for other in words if other != word):
            first, second, third, *more = (letter & 31 for letter in word[:4])
            for fourth in more or range(32):
                key = (first * 32 + second) * _MIX + third * 32 + fourth
                mixed.setdefault(key % 2**16, set()).add(word)
    groups = sorted({tuple(sorted(places)) for places in mixed.values()})
    begins = np.zeros(2**16, np.bool_)
    group = np.zeros(2**16, np.uint8)
    for key, names in mixed.items():
        begins[key] = True
        group[key] = groups.index(tuple(sorted(names)))
    rounds = range(max(map(len, groups)))
    return _KeywordTable(begins, group, tuple(_words_at(groups, at) for at in rounds))


def _words_at(groups: list[tuple[bytes, ...]], at: int) -> _WordFinder:
    """The word number `at` of each group. Of a group that has none, a value that no text is equal to."""
    halves = []
    for begin in (0, 8):
        parts = [group[at][begin : begin + 8] if at < len(group) else None for group in groups]
        halves.append([0 if part is None else 256 ** len(part) - 1 for part in parts])
        halves.append([1 if part is None else int.from_bytes(part, "little") for part in parts])
    more = np.array([at + 1 < len(group) for group in groups])
    first_mask, first, last_mask, last = (np.array(half, np.uint64) for half in halves)
    return _WordFinder(first_mask, first, last_mask, last, more)
