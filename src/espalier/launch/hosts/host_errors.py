"""Error messages for a host process that could not be started, was silent or ended. No torch."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from espalier.launch.hosts.hosts import Host
from espalier.launch.ranks import rank_process
from espalier.recipe import errors
from espalier.recipe.errors import EspalierError, HostLost, Interrupted, RunFailed, UserError

_SHELL = 128  # a shell adds this to the number of the signal that ended its child


def gone(host: Host, met: bool, argv: Sequence[str], code: int, last: str) -> EspalierError:
    """The supervisor on `host` has ended with `code` (negative: by that signal) and said nothing of it.

    `met`: whether it ever spoke; else the host itself could not be reached.
    """
    shown = shlex.join(argv)
    words = f"; its last words: {last}" if last else ""
    if met:
        what, why = rank_process.ended(f"The supervisor on host {host.name}", _status(code))
        if code == 255:
            what = f"The connection to host {host.name} (the supervisor) was lost."
            why = f"`{shown}` ended with 255, as ssh does"
        why = why or "it said nothing of it"
        return RunFailed(what, why=why + words, do="run the same command to resume")
    if "No module named 'espalier" in last or "No module named espalier" in last:
        return UserError(
            f"Espalier is not installed on host {host.name}.",
            why=f"`{shown}` said: {last}",
            do='install it there, or name an interpreter that has it: launch.python = "/path/to/python"',
        )
    if code in (126, 127):
        return UserError(
            f"Host {host.name} has no such Python.",
            why=f"`{shown}` ended with {code}{words}",
            do='name an interpreter that has Espalier there: launch.python = "/path/to/python"',
        )
    return UserError(
        f"Host {host.name} cannot be reached.",
        why=f"`{shown}` ended with {code}{words}",
        do=f"run that command by hand; over ssh the host needs your key (ssh-copy-id {host.name})",
    )


def unanswered(host: Host, argv: Sequence[str], seconds: float, last: str, others: Sequence[str] = ()) -> UserError:
    """The process on `host` said nothing for `seconds`, nor did those on hosts named `others`."""
    nor = f" Nor did {', '.join(others)}." if others else ""
    return UserError(
        f"Host {host.name} did not answer within {seconds:.0f} s.{nor}",
        why=f"`{shlex.join(argv)}` is still waiting" + (f"; its last words: {last}" if last else ""),
        do="run that command by hand",
    )


def resume(hosts: Sequence[Host], away: Sequence[Host]) -> str:
    """What to do where the hosts `away` do not come back. The first of `hosts` has the run."""
    again = "run the same command once all of them answer; comm.timeout is how long they are waited for"
    if hosts[0] in away:
        return again
    return f"resume with --hosts {','.join(str(host) for host in hosts if host not in away)}, or {again}"


def retold(host: Host, answer: Mapping[str, Any]) -> EspalierError:
    """The error that a process on `host` told of, in this process, with the host. An interrupt is nobody's."""
    error = errors.from_words([answer["kind"], answer["what"], answer["why"], answer["do"]])
    if isinstance(error, Interrupted | HostLost) or error.what.startswith("On host "):
        return error
    return type(error)(f"On host {host.name}: {error.what}", why=error.why, do=error.do)


def together(failed: Sequence[EspalierError]) -> EspalierError:
    """One error of several: the first, with the hosts that could not be reached either."""
    first = failed[0]
    hosts = [match[1] for error in failed[1:] if (match := re.match(r"Host (\S+) cannot be reached", error.what))]
    if not hosts or not isinstance(first, UserError):
        return first
    return UserError(f"{first.what} Nor can {', '.join(hosts)}.", why=first.why, do=first.do)


def _status(code: int) -> int:
    """Of the process itself, whose shell tells a signal by a number of its own."""
    try:
        return -signal.Signals(code - _SHELL)
    except ValueError:
        return code
