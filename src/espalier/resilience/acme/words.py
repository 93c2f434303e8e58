"""Which lines hold a word that could matter: one look at each shape, the plain form and a fast one for many at once.

A shape is a line's letters alone, in lower case. The fast form looks up every four letters in a table of the words'
beginnings and compares whole words only where a beginning stands.
"""

from __future__ import annotations

from collections.abc import Sequence

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
"""
WORDS = tuple(sorted({word.replace("(", "").encode() for word in _LINES.split()}))

_UPPER = bytes(range(65, 91))
_OTHERS = bytes(sorted(set(range(256)) - set(_UPPER) - set(_UPPER.lower()) - {10}))
_LOWER = bytes.maketrans(_UPPER, _UPPER.lower())


def shapes(lines: bytes) -> bytes:
    """`lines` without anything but letters, in lower case, and line feeds."""
    return lines.translate(_LOWER, _OTHERS)


def matters(shape: bytes) -> bool:
    """Whether a line of this shape could matter: the plain form."""
    return any(word in shape for word in WORDS)


def which_matter(found: Sequence[bytes]) -> list[bool]:
    """`matters` of each of many shapes, none of which holds a line feed."""
    verdicts = [False] * len(found)
    if not found:
        return verdicts
    text = b"\n".join(found) + b"\n\n\n\n"
    codes = _CODES[np.frombuffer(text, np.uint8)]
    grams = (codes[:-3] << 15) | (codes[1:-2] << 10) | (codes[2:-1] << 5) | codes[3:]
    hits = np.flatnonzero(_BEGINS[grams])
    if not len(hits):
        return verdicts
    ends = np.flatnonzero(codes == 0)
    rows = np.searchsorted(ends, hits)
    for hit, row in zip(hits.tolist(), rows.tolist(), strict=True):
        if not verdicts[row] and text.startswith(_BY_GRAM[text[hit : hit + 3]], hit):
            verdicts[row] = True
    return verdicts


def _codes() -> NDArray[np.uint32]:
    codes = np.zeros(256, np.uint32)
    codes[97:123] = np.arange(1, 27)
    return codes


def _begins() -> NDArray[np.bool_]:
    """[2²⁰]: whether a word begins with these four letters of five bits; of three, with any fourth."""
    table = np.zeros(1 << 20, np.bool_)
    for word in WORDS:
        first, second, third, *more = _CODES[np.frombuffer(word[:4], np.uint8)].tolist()
        start = first << 15 | second << 10 | third << 5
        table[start + more[0] if more else slice(start, start + 32)] = True
    return table


_CODES = _codes()
_BEGINS = _begins()
_BY_GRAM = {begin: tuple(word for word in WORDS if word[:3] == begin) for begin in {word[:3] for word in WORDS}}
