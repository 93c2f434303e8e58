"""What if something breaks? A Failure is what was seen; a RestartBudget says whether to start again. Pure, no torch.

After Acme (arXiv 2403.07648), section 6.1: what a person would only start again starts again by itself; what cannot
succeed unchanged stops and says why. Where we deviate: restarts are counted per root cause and the counts begin anew
whenever the run got further than ever before, so that a long run outlives any number of unrelated failures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from espalier.recipe.errors import Anomaly, Corrupted, Diverged, EspalierError, PeerLost, UserError

Kind = Literal[
    "user", "exception", "killed", "exit", "hang", "stopped", "lost", "signal", "anomaly", "corrupt", "replanned"
]
"""user: the input is at fault · exception: code raised · killed: by a signal · exit: ended before the end ·
hang: no step is made · stopped: frozen by SIGSTOP · lost: a wait for others failed, nobody knows more ·
signal: somebody asked one rank, not the run, to stop · anomaly: the loss went wrong · corrupt: a rank no longer held
what the others did · replanned: ended on purpose, to go on by another plan."""

KINDS: dict[type, Kind] = {
    UserError: "user", PeerLost: "lost", Anomaly: "anomaly", Corrupted: "corrupt", Diverged: "corrupt",
}  # fmt: skip
"""What our own errors tell of, by their class; others: an exception."""

Ground = Literal["", "retry", "stop"]
"""Which way a diagnosis steers restarts (`acme.ruling`); empty: it leaves them to the kind."""

_ALLOWED: dict[Kind, int] = {"user": 0, "exception": 1}
_OTHERWISE = 3
"""Restarts of one cause without progress: none where an unchanged run cannot succeed, one where that is not known,
three for machines and networks. A diagnosis of the log may know better: see `RestartBudget`."""

_LONGEST_WAIT = 60.0  # seconds

BEFORE_THE_FIRST_STEP = frozenset({
    "ArgumentError", "AssertionError", "AttributeError", "FileNotFoundError", "ImportError", "IndentationError",
    "KeyError", "IndexError", "ModuleNotFoundError", "NameError", "NotADirectoryError", "PermissionError",
    "SyntaxError", "TypeError", "UnboundLocalError", "ValueError", "ZeroDivisionError",
})  # fmt: skip
"""Exceptions that an unchanged program raises again when it raised them before any step: Acme's script errors."""

MACHINE = frozenset({
    "BrokenPipeError", "ConnectionAbortedError", "ConnectionError", "ConnectionRefusedError", "ConnectionResetError",
    "DistBackendError", "DistNetworkError", "DistStoreError", "MemoryError", "TimeoutError",
})  # fmt: skip
"""Exceptions that tell of machines and networks, not of code."""


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended.

    Attributes:
        kind: see Kind.
        rank: the first rank that failed; -1 where that is not known.
        what: one sentence for people; why: what is behind it.
        step: steps done when it happened.
        raised: name of the exception's type, where one was raised.
        category, reason: of Acme's taxonomy, once it was diagnosed.
        ground: see Ground.
    """

    kind: Kind
    rank: int
    what: str
    why: str = ""
    step: int = 0
    raised: str = ""
    category: str = ""
    reason: str = ""
    ground: Ground = ""

    @property
    def cause(self) -> str:
        """The same text for the same root cause: ranks, steps and addresses left out."""
        return f"{self.kind} {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', self.what)}"


def kind_of(raised: str, step: int) -> Kind:
    """What an exception of type `raised` after `step` steps tells of."""
    if raised in MACHINE:
        return "lost"
    return "user" if step == 0 and raised in BEFORE_THE_FIRST_STEP else "exception"


@dataclass(frozen=True)
class RestartDecision:
    """What to do after a failure: start again after `wait` seconds, or stop; `why` in words."""

    restart: bool
    wait: float
    why: str

    def action(self, again: str) -> str:
        """What is done, in words: `again` or nothing more; and why."""
        return f"{again if self.restart else 'stop'} ({self.why})"

    def last(self, error: EspalierError) -> EspalierError:
        """`error` as that which ends the run, with why nothing more is tried."""
        return type(error)(error.what, why="; ".join(filter(None, (error.why, self.why))), do=error.do)


class RestartBudget:
    """How often to start again. Has state: restarts by cause since the run last got further.

    Args:
        restarts: of one cause without progress; None: as the kind of cause deserves (`Kind`), 0: never.

    Attributes:
        furthest: the most steps ever done when something failed; -1: nothing has.
    """

    def __init__(self, restarts: int | None = None) -> None:
        self._restarts = restarts
        self._spent: dict[str, int] = {}
        self.furthest = -1

    def decide(self, failure: Failure) -> RestartDecision:
        """What to do after `failure`; counts it."""
        if failure.step > self.furthest:
            self.furthest = failure.step
            self._spent.clear()
        limit, allowed = self._allowed(failure)
        spent = self._spent.get(failure.cause, 0)
        if not limit:
            reason = f" ({failure.reason})" if failure.ground == "stop" else ""
            return RestartDecision(False, 0.0, f"an unchanged run would fail again{reason}")
        if spent >= allowed:
            times = f"after {spent} restart{'s' if spent != 1 else ''} " if spent else ""
            why = f"it came back {times}with no step gained" if spent else "faults.restarts = 0"
            return RestartDecision(False, 0.0, why)
        before = sum(self._spent.values())
        self._spent[failure.cause] = spent + 1
        wait = min(_LONGEST_WAIT, 2.0 ** (before - 1)) if before else 0.0
        return RestartDecision(True, wait, f"restart {spent + 1} of {allowed} for this cause since the last progress")

    def permits(self, failure: Failure) -> bool:
        """Whether `decide` would start again, as far as is known before the diagnosis; counts nothing."""
        spent = 0 if failure.step > self.furthest else self._spent.get(failure.cause, 0)
        return spent < self._allowed(failure)[1]

    def _allowed(self, failure: Failure) -> tuple[int, int]:
        """Restarts that the cause deserves, and those that the user grants it."""
        limit = _ALLOWED.get(failure.kind, _OTHERWISE)
        if failure.raised and failure.ground == "retry":
            limit = _OTHERWISE  # the machine's fault, whatever the exception's class
        elif failure.raised and failure.ground == "stop" and max(failure.step, self.furthest) <= 0:
            limit = 0  # code that has made steps has proved itself; what has not is not helped by a second start
        return limit, limit if self._restarts is None or not limit else self._restarts
