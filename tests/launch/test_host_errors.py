"""Ends that nobody explained are explained by the command and its last words."""

from __future__ import annotations

import pytest

from espalier.launch.hosts import host_errors
from espalier.launch.hosts.hosts import Host
from espalier.recipe.errors import RunFailed, UserError

ARGV = ["ssh", "b", "exec python -m it"]


def test_a_host_without_espalier_or_python_is_told_from_one_that_is_away() -> None:
    away = host_errors.gone(Host("b"), False, ARGV, 255, "ssh: connect to host b port 22: Connection refused")
    assert isinstance(away, UserError)
    assert away.what == "Host b cannot be reached."
    assert "ssh b 'exec python -m it'" in away.why
    assert "Connection refused" in away.why
    assert "no such Python" in host_errors.gone(Host("b"), False, ARGV, 127, "sh: python: not found").what
    bare = host_errors.gone(Host("b"), False, ARGV, 1, "python: No module named espalier")
    assert "Espalier is not installed on host b" in bare.what
    assert "launch.python" in bare.do


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "killed (SIGKILL)"), (137, "killed (SIGKILL)"), (255, "connection to host b"), (3, "exit code 3")],
)
def test_a_supervisor_that_ends_is_named_with_its_host(code, words) -> None:
    error = host_errors.gone(Host("b"), True, ARGV, code, "last words")
    assert isinstance(error, RunFailed)
    assert words in error.what
    assert "b" in error.what
    assert "last words" in error.why


def test_several_hosts_that_are_away_are_one_error() -> None:
    both = host_errors.together([host_errors.gone(Host(name), False, ARGV, 255, "") for name in ("b", "c")])
    assert "Host b cannot be reached." in both.what
    assert "Nor can c" in both.what


def test_a_silent_host_is_named_with_what_it_was_asked() -> None:
    error = host_errors.unanswered(Host("b"), ARGV, 60.0, "")
    assert "Host b did not answer within 60 s" in error.what
    assert "exec python" in error.why


def test_what_a_process_told_is_raised_here_with_its_host_once() -> None:
    def told(kind: str, what: str) -> str:
        return str(host_errors.retold(Host("b"), {"kind": kind, "what": what, "why": "", "do": ""}))

    assert told("UserError", "bad") == "On host b: bad"
    assert told("RunFailed", "On host c: Rank 2 hangs.") == "On host c: Rank 2 hangs."
    assert told("HostLost", "Host c was not heard.") == "Host c was not heard."
    assert told("Interrupted", "saved") == "saved"
