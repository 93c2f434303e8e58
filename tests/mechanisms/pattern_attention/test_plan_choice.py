"""The plan of a large pattern is the one that took the least time, is timed once, and computes the same attention."""

from __future__ import annotations

import json

import pytest
import torch
from tests.graph.conftest import made
from tests.graph.test_workload import recipe_of

from espalier.graph import workload_row
from espalier.graph.workload import GraphWorkload
from espalier.mechanisms.pattern_attention import plan_choice
from espalier.mechanisms.pattern_attention.attention import EDGE, attention, by_counts, reference
from espalier.mechanisms.pattern_attention.model import tokens_of
from espalier.mechanisms.pattern_attention.pattern import pattern
from espalier.recipe.cache_dir import cache_folder
from espalier.train.workload_row import Opening


@pytest.fixture(autouse=True)
def _small(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plan_choice, "MEASURED", 50)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def cliques():
    every = torch.arange(64)
    pairs = torch.stack([every.repeat(64), every.repeat_interleave(64)])
    return pattern(pairs[:, pairs[0] // 16 == pairs[1] // 16], 64)


def test_the_fastest_is_taken_kept_and_found_again_and_changes_only_rounding(monkeypatch):
    timed = []

    def took(known, plan, *sizes):
        timed.append(plan)
        known.divided(plan.least)
        return 1.0 if plan == EDGE else 2.0

    monkeypatch.setattr(plan_choice, "seconds", took)
    known = cliques()
    assert by_counts(known).name == "hybrid"
    said = plan_choice.choose(known, 2, 4)
    assert known.chosen["auto"] == EDGE
    assert "edge, where counts foretell hybrid" in said
    assert set(known._divided) == {EDGE.least}  # what the others needed is gone
    q, k, v = (torch.randn(64, 2, 4, dtype=torch.float64) for _ in range(3))
    assert torch.allclose(attention(q, k, v, known, plan="auto"), reference(q, k, v, known), atol=1e-10)
    assert len(timed) == len(plan_choice.CANDIDATES)
    again = cliques()
    assert plan_choice.choose(again, 2, 4) == said
    assert again.chosen == known.chosen
    assert len(timed) == len(plan_choice.CANDIDATES)
    (place,) = (cache_folder() / "attention plans").iterdir()
    place.write_text(json.dumps({"edge": 1.0}))
    plan_choice.choose(cliques(), 2, 4)
    plan_choice.choose(cliques(), 4, 4)  # other sizes have a choice of their own
    assert len(timed) == 3 * len(plan_choice.CANDIDATES)


def test_where_nothing_can_be_kept_counts_decide_so_that_two_runs_are_alike(monkeypatch):
    def full(path, content):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(plan_choice, "write_atomic", full)
    monkeypatch.setattr(plan_choice, "seconds", lambda *given: pytest.fail("nothing is timed"))
    for _ in range(2):
        known = cliques()
        assert "hybrid, by counts, as measurements cannot be kept" in plan_choice.choose(known, 2, 4)
        assert not known.chosen
        assert plan_choice.name(known) == "hybrid"


def test_a_run_that_goes_on_takes_the_plan_that_it_began_with_whatever_is_measured_now(monkeypatch, tmp_path):
    times = {"edge": 1.0, "hybrid": 2.0}
    monkeypatch.setattr(plan_choice, "seconds", lambda known, plan, *sizes: times.get(plan.name, 3.0))
    model = {"kind": "graph-transformer", "depth": 1, "width": 8, "heads": 2, "feed_forward": 8, "attention": "sparse"}
    began = GraphWorkload(recipe_of(model), made())
    assert began.network.plan(began)[0] == "edge"
    (tmp_path / "kept").mkdir()
    workload_row.ROW.freeze(began, tmp_path / "kept")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    times.update(edge=4.0)
    other = GraphWorkload(recipe_of(model), made())
    assert other.network.plan(other)[0] != "edge"
    opening = Opening(frozen=tmp_path / "kept", reads=False)
    again = workload_row.ROW.open(recipe_of(model), opening)
    assert again.network.plan(again)[0] == "edge"
    assert "as when the run began" in again.decisions()[-1]


def test_seconds_are_the_median_of_passes_after_the_first():
    clock = iter([0, 100, 200, 203, 300, 301, 400, 402])
    assert plan_choice.seconds(cliques(), EDGE, 2, 4, lambda: next(clock)) == 2


def test_a_small_pattern_is_decided_by_counts(monkeypatch):
    monkeypatch.setattr(plan_choice, "MEASURED", 1 << 20)
    known = cliques()
    assert plan_choice.choose(known, 2, 4) == ""
    assert not known.chosen


def test_a_plan_says_what_was_measured_and_patterns_with_fewer_edges_are_computed_alike():
    model = {"kind": "graph-transformer", "depth": 1, "width": 8, "heads": 2, "feed_forward": 8, "attention": "sparse"}
    workload = GraphWorkload(recipe_of(model), made())
    assert "forward and backward of a layer" in workload.decisions()[-1]
    block = workload.task.train.block
    whole = tokens_of(block, workload.recipe.model, path=False, full=False).pattern
    fewer = tokens_of(block._replace(recall=0.5), workload.recipe.model, path=False, full=False).pattern
    assert fewer.entries < whole.entries
    assert fewer.chosen == whole.chosen
    assert whole.chosen["auto"] in plan_choice.CANDIDATES.values()
