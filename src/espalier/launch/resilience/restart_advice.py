"""Restart advice: diagnoses a failed rank's error and the end of its log for the restart budget.

After Acme (arXiv 2403.07648), section 6.1, where rules decide between a restart and a person. Where we deviate: only
grounds steer. A reason that no rule of the product's own has found, or that a class of exception alone suggests, is
told and changes nothing; and what takes longer than a fraction of a second is not waited for.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from espalier.ops.taxonomy import HANG, LOSS_ANOMALY, NO_FAILURE, REASONS, UNKNOWN, Diagnosis
from espalier.train.failure import Failure, Ground

if TYPE_CHECKING:
    from espalier.ops.root_cause import Cause

TAIL = 16 << 10
"""Bytes of the log that are looked at, the last ones: a traceback and what stands before it."""
SECONDS = 0.5
_WEAK = ("OS Error", "Runtime Error")
"""Reasons whose errors machines cause as well as programs: a full disk may be emptied, torch raises RuntimeError for
anything."""
_SILENT: dict[str, str] = {
    "anomaly": LOSS_ANOMALY, "hang": HANG, "user": "Argument Error", "corrupt": "ECC Error",
}  # fmt: skip
"""Reasons of failures that leave nothing in a log, by kind. Acme has no word for what memory or a processor got wrong
unnoticed; nearest is what was noticed."""
_OF_NCCL = {HANG: "NCCL Timeout Error"}
"""What Acme calls it where ranks meet over NCCL."""
_OF_OTHERS = {"NCCL Timeout Error": HANG, "NCCL Remote Error": "Connection Error"}
"""What the reasons of NCCL are where ranks meet by other means."""
_MUTE = ("hang", "stopped", "signal", "anomaly", "corrupt")
"""Kinds whose log tells of something else: the stacks that the rank was asked for, or nothing."""


class _Late(Exception):
    """The time is up."""


@dataclass(frozen=True)
class Ruling:
    """What a failure is called, and what it calls for.

    Attributes:
        category, reason: of the taxonomy.
        action: of the taxonomy, see `taxonomy.Action`.
        suspect: the host to test, where the action is to isolate one; else empty.
        root: the line that shows the cause; empty where none does.
        ground: whether it may steer restarts, and which way.
    """

    category: str
    reason: str
    action: str
    suspect: str = ""
    root: str = ""
    ground: Ground = ""


NOTHING = Ruling("", "", "")
"""Of an end on purpose."""


@cache
def ready() -> None:
    """Loads what reads logs, and its rules, once, so that the first failure need not wait for that."""
    _read(b"RuntimeError: nothing\n")


def of(failure: Failure, log: Path | None, position: int, seconds: float = SECONDS, nccl: bool = True) -> Ruling:
    """The ruling on `failure` after at most about `seconds`; `Unknown` where nothing tells why.

    Never raises: a run must not end because its failure could not be explained. Main thread only, where the time is
    kept by SIGALRM.

    Args:
        failure: what the supervisor saw.
        log: what the rank wrote to its standard error, if anywhere.
        position: where in `log` this attempt began.
        seconds: how long it may take.
        nccl: whether ranks meet over NCCL; no reason of it is given where they do not.
    """
    ready()  # before the alarm: an import is not to be cut off
    names = _OF_NCCL if nccl else _OF_OTHERS
    found = None
    try:
        with _within(seconds):
            found = _found(failure, log, position)
    except Exception as error:  # a log may hold anything, and rules are patterns over it
        return replace(named(UNKNOWN), root="" if isinstance(error, _Late) else f"not diagnosed: {error}")
    if found is None:
        reason = _SILENT.get(failure.kind, UNKNOWN)
        ruling = named(names.get(reason, reason))
    else:
        told, cause = found
        root = told.evidence[0].text if told.evidence else ""
        suspect = told.suspect_node or "" if told.action == "isolate" else ""
        ruling = Ruling(told.category, told.reason, told.action, suspect, root)
        if told.reason in names:
            ruling = replace(named(names[told.reason], suspect, root), action=told.action)
        ruling = replace(ruling, ground=_ground(failure, told, cause))
    here = failure.rank >= 0 and ruling.action == "isolate" and not ruling.suspect
    return replace(ruling, suspect=socket.gethostname()) if here else ruling


def named(reason: str, suspect: str = "", root: str = "") -> Ruling:
    """The ruling where the reason is known, and maybe the host and the line that shows it."""
    return Ruling(REASONS[reason].category, reason, REASONS[reason].action, suspect, root)


def _found(failure: Failure, log: Path | None, position: int) -> tuple[Diagnosis, Cause] | None:
    """What rules find in the log's end, or else in the error's own words."""
    if failure.kind in _MUTE:
        return None
    own = failure.kind == "user" and not failure.raised  # our own words, which stand in no log
    words = failure.what if own or failure.kind == "lost" else ""
    if failure.raised:
        words = f"{failure.raised}: {failure.what.partition(f'{failure.raised}: ')[2]}"
    texts = [b"" if own else _tail(log, position), words.encode()]
    return next((known for text in texts if text and (known := _read(text)) is not None), None)


def _read(text: bytes) -> tuple[Diagnosis, Cause] | None:
    from espalier.ops import diagnosis

    case = diagnosis.of_text(text)
    if case.cause is None:
        return None
    told = diagnosis.of_case(case, diagnosis.Means())
    return None if told.reason in (UNKNOWN, NO_FAILURE) else (told, case.cause)


def _ground(failure: Failure, told: Diagnosis, cause: Cause) -> Ground:
    """Which way the diagnosis may steer: against restarts only where the exception that ended the rank is the cause,
    and known by more than its class."""
    from espalier.ops.rules import built_in_rules

    if told.action in ("retry", "isolate"):
        return "retry"
    itself = bool(failure.raised) and any(failure.raised in one.line.text for one in (cause.root, cause.named))
    known = cause.named.rule in built_in_rules() and cause.named.rule.role == "root" and told.reason not in _WEAK
    return "stop" if told.action == "stop" and itself and known else ""


def _tail(log: Path | None, position: int) -> bytes:
    """The end of what this attempt wrote, whole lines."""
    if log is None or not log.exists():
        return b""
    with log.open("rb") as file:
        start = max(position, file.seek(0, 2) - TAIL)
        file.seek(start)
        text = file.read(TAIL)
    return text if start == position else text.partition(b"\n")[2]


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises `_Late` when the time is up, also within a regular expression. Another's alarm is set again."""

    def late(number: int, frame: FrameType | None) -> None:
        raise _Late

    handler = signal.signal(signal.SIGALRM, late)
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # also where the alarm came just then
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, again)
