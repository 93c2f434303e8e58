"""Who killed a rank, by the kernel's count of what it killed for want of memory."""

from __future__ import annotations

import signal

import pytest

from espalier.launch.ranks import rank_process
from espalier.machine import resource_limits


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [(2, 3, "the system was out of memory"), (2, 2, "somebody else killed it"), (None, None, "probably out of memory")],
)
def test_a_rank_that_was_killed(monkeypatch, before, now, words):
    monkeypatch.setattr(rank_process, "OOM_KILLS", before)
    monkeypatch.setattr(resource_limits, "oom_kills", lambda: now)
    what, why = rank_process.ended("Rank 1", -signal.SIGKILL)
    assert what == "Rank 1 was killed (SIGKILL)."
    assert words in why
