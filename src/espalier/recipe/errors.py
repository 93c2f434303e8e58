"""Every error a user can see: what happened, why, and what to do next. Imports nothing of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

DISTRIBUTION = "espalier-train"
"""What package indexes and pip call Espalier."""

RESUME = "run the same command again; it goes on from the newest checkpoint, where there is one"
"""What to do about most failures. A run that broke down before it was saved begins anew."""


class EspalierError(Exception):
    """Base of all errors meant for people. `str()` is the whole message, ready to print."""

    exit_code = 2

    def __init__(self, what: str, *, why: str = "", do: str = "") -> None:
        self.what, self.why, self.do = what, why, do
        lines = [what]
        if why:
            lines.append(f"  why: {why}")
        if do:
            lines.append(f"  try: {do}")
        super().__init__("\n".join(lines))

    @property
    def table(self) -> dict[str, str]:
        """As `--json` prints it."""
        return {"error": self.what, "why": self.why, "try": self.do}

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (type(self), self.what, self.why, self.do))


def _restore(kind: type[EspalierError], what: str, why: str, do: str) -> EspalierError:
    return kind(what, why=why, do=do)


class UserError(EspalierError):
    """The input (recipe, data, cluster, command line, folder) is at fault. Exit code 2."""


class RunFailed(EspalierError):
    """The run itself went wrong: a rank died, the loss is not a number. Exit code 1."""

    exit_code = 1


class Anomaly(RunFailed):
    """The loss went wrong in a way that another attempt can leave behind. Exit code 1."""


class Corrupted(RunFailed):
    """A rank holds something else than the others, where all should hold the same. Exit code 1."""


class Diverged(Corrupted):
    """Ranks hold different states, and nobody knows which are right. Exit code 1."""


class PeerLost(RunFailed):
    """A wait for other ranks ended without them. Some other rank usually knows the cause. Exit code 1."""


class HostLost(PeerLost):
    """A whole host was not heard for too long, or its supervisor has ended. Exit code 1."""


class Interrupted(EspalierError):
    """Stopped by the user (Ctrl-C or SIGTERM) after saving. Exit code 130."""

    exit_code = 130


def words_of(error: EspalierError) -> tuple[str, str, str, str]:
    """`error` as plain words, for a process that `from_words` makes it again in: its kind, what, why, do.

    The kind is a class of this module: of an error derived from one, that one.
    """
    kind = next(kind for kind in type(error).__mro__ if kind in _KINDS.values())
    return kind.__name__, error.what, error.why, error.do


def from_words(words: Sequence[str]) -> EspalierError:
    """The error of `words_of`. A kind that is none of this module's becomes a RunFailed."""
    kind, what, why, do = map(str, words)
    return _KINDS.get(kind, RunFailed)(what, why=why, do=do)


_KINDS = {
    kind.__name__: kind
    for kind in (
        EspalierError,
        UserError,
        RunFailed,
        Anomaly,
        Corrupted,
        Diverged,
        PeerLost,
        HostLost,
        Interrupted,
    )
}


MISSPELLED = 0.7
"""How alike two words are (2 x letters in common / letters of both) that one may be a misspelling of the other."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` misspells, or None: a slip of the pen changes few letters and no digit."""
    digits = [letter for letter in word if letter.isdigit()]
    same = [candidate for candidate in known if [letter for letter in candidate if letter.isdigit()] == digits]
    matches = difflib.get_close_matches(word, same, n=1, cutoff=MISSPELLED)
    swapped = (candidate for candidate in same if len(word) > 2 and sorted(candidate) == sorted(word))
    return matches[0] if matches else next(swapped, None)


def missing_extra(library: str, extra: str, purpose: str) -> UserError:
    """The error for an optional library that is not installed."""
    return UserError(
        f"{purpose} needs the library '{library}', which is not installed.",
        do=f"pip install '{DISTRIBUTION}[{extra}]'",
    )
