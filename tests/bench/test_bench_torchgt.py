"""Contestants of the bench of TorchGT: rows of those that make their steps, and of those that need too much memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

CONTESTANT = """
import json, sys, time
name, held = sys.argv[2], b""
if name == "needs much":
    held = b"x" * (200 << 20)
    time.sleep(30)
if name == "is refused":
    print(json.dumps({"refused": 300 << 20}))
    sys.exit()
if name == "fails":
    sys.exit(3)
print(json.dumps({"bytes": 1 << 20, "held": 2 << 20, "peak": 3 << 20, "plan": "edge"}), flush=True)
for _ in sys.stdin:
    if name == "needs much in a step":
        held = b"x" * (200 << 20)
        time.sleep(30)
    print(json.dumps({"seconds": 1.0 if name == "ours" else 2.0}), flush=True)
"""
LIMIT = 100 << 20


@pytest.fixture
def bench(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    import torchgt

    (tmp_path / "contestant.py").write_text(CONTESTANT)
    monkeypatch.setattr(torchgt, "__file__", str(tmp_path / "contestant.py"))
    return torchgt


@pytest.mark.parametrize("together", [True, False])
def test_a_peer_that_needs_more_memory_is_ended_and_its_row_says_so(bench, together):
    names = ["needs much", "peer", "needs much in a step", "is refused"]
    case = bench.Case("graph", "a graph", 2, LIMIT)
    rows = list(bench.steps(case, names, together, "cache"))
    assert [row.peer for row in rows] == ["needs much", *["peer"] * 3, *names[2:]]
    for row in (rows[0], rows[4]):
        assert LIMIT / 2**20 < row.peer_value < 250
        assert row.spread.startswith("out of memory: needs over 0.")
        assert (row.ours, row.unit) == (2, "MiB")
    assert rows[5].peer_value == 300
    step, memory, held = rows[1:4]
    assert (step.ours, step.peer_value, step.ratio) == (1, 2, 2)
    assert (memory.ours, held.ours) == (1, 2)


def test_a_peer_that_fails_otherwise_ends_the_bench(bench):
    with pytest.raises(RuntimeError, match="fails ended with 3 on graph"), bench.up("fails", "graph", "cache"):
        pass


@pytest.mark.slow
def test_every_contestant_makes_a_step(bench, monkeypatch, tmp_path):
    pytest.importorskip("torch_geometric")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = bench.path_of(256, 10)
    for name in (*bench.OURS, *bench.PEERS, *bench.QUADRATIC):
        run, plan = bench.step_of(name, path, str(tmp_path))
        assert 0 < run() < 10
        assert bool(plan) == (name in bench.OURS)
    monkeypatch.undo()  # a process of its own
    with bench.up("TransformerConv", path, str(tmp_path)) as (ask, told):
        assert ask() > 0
        assert 0 < told.step < told.held <= told.peak
