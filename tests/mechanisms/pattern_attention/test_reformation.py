"""Reformed patterns: recall is what a count of the edges says, and never below the bound; the tuner follows the losses,
and a run that was stopped goes on as one that was not."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.graph.test_workload import recipe_of
from tests.mechanisms.halo_exchange.test_halo_parallel import machines, plan_of, train

from espalier.graph.tasks.loss_speed import LossSpeed
from espalier.graph.workload import GraphWorkload
from espalier.mechanisms.pattern_attention.attention import attention
from espalier.mechanisms.pattern_attention.edge_dropping import LEVEL_RULE, LEVELS, RecallTuner, reformed
from espalier.mechanisms.pattern_attention.pattern import ROWS, Additions, pattern
from espalier.plan import base as plans
from espalier.plan import decide
from espalier.recipe.errors import UserError
from espalier.track.decision_log import Decisions, Recorded
from espalier.train import rank_spec as launch
from espalier.train import request_from_recipe, trainer
from espalier.train.rank_setup import RankSetup

MODEL = {"kind": "graph-transformer", "depth": 2, "width": 16, "heads": 4, "feed_forward": 16, "dropout": 0.0}


def whole(nodes=70, edges=600, seed=0):
    random = np.random.default_rng(seed)
    ends = (random.random((2, edges)) ** 2 * nodes).astype(np.int64)  # low numbers are in more edges
    return pattern(torch.from_numpy(ends), nodes, Additions(path=True, virtual=1)), ends


@pytest.mark.parametrize("recall", [0.0, 0.5, 0.83, 0.9, 1.0])
def test_recall_is_that_of_a_count_and_not_below_the_bound_and_only_edges_go(recall):
    known, ends = whole()
    found = reformed(known, recall)
    before, after = known.dense(), found.pattern.dense()
    assert not (after & ~before).any()
    edges = {(s, t) for s, t in ends.T.tolist() if s != t and abs(s - t) > 1}
    edges |= {(s, t) for s, t in ends.T.tolist() if abs(s - t) == 1}  # an edge along the path is an edge
    kept = sum(bool(after[t, s]) for s, t in edges)
    assert found.recall == pytest.approx(kept / len(edges))
    assert recall <= found.recall < recall + 1 / len(edges)
    others = torch.ones_like(before)
    for s, t in edges:
        others[t, s] = False
    assert torch.equal(before & others, after & others)
    assert (reformed(known, 1.0).pattern.matrix.indices == known.matrix.indices).all()


def test_what_goes_is_read_by_no_more_rows_of_a_window_than_what_stays():
    known, _ = whole()
    rows, columns = known.matrix.rows.numpy(), known.matrix.indices.numpy()
    keys = rows // ROWS * known.tokens + columns
    _, column, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    gone = np.ones(len(rows), bool)
    gone[reformed(known, 0.6).entries.numpy()] = False
    real = known.kinds.numpy() == 1
    assert sizes[column[gone]].max() <= sizes[column[real & ~gone]].min()


def test_attention_over_a_reformed_pattern_is_masked_attention_with_the_bias_of_what_is_kept():
    known, _ = whole()
    found = reformed(known, 0.7)
    q, k, v = torch.randn(3, known.tokens, 2, 8, dtype=torch.float64)
    bias = torch.randn(known.entries, 2, dtype=torch.float64)
    out = attention(q, k, v, found.pattern, bias=bias[found.entries])
    dense = torch.full((2, known.tokens, known.tokens), -torch.inf, dtype=torch.float64)
    rows, columns = known.matrix.rows[found.entries], known.matrix.indices[found.entries].long()
    dense[:, rows, columns] = bias[found.entries].T
    expected = torch.nn.functional.scaled_dot_product_attention(*(one.transpose(0, 1) for one in (q, k, v)), dense)
    assert torch.allclose(out, expected.transpose(0, 1), rtol=1e-10, atol=1e-10)


def test_the_tuner_stays_between_all_edges_and_the_bound_and_replays_the_same_decisions():
    random = np.random.default_rng(0)
    falls = np.exp(-np.linspace(0, 3, 40))  # ever more slowly: edges come back
    losses = [*falls, *(2 - np.exp(np.linspace(0, 0.6, 40))), *random.random(20)]
    for bound in (0.5, 0.9):
        tuner, again, seen = RecallTuner(bound), RecallTuner(bound), []
        for at, loss in enumerate(losses):
            if at == 50:
                again = RecallTuner(bound)
                again.load_state_dict(tuner.state_dict())
            for one in (tuner, again):
                one.heard([loss]).turned({})
            assert tuner.recall == again.recall
            seen.append(tuner.recall)
        assert min(seen) >= bound
        assert max(seen) == seen[39] == 1
        assert len(set(seen)) > 1
        assert len(tuner.levels) == LEVELS


def test_decisions_are_told_and_taken_from_a_log_where_it_knows_the_step():
    losses = [*np.exp(-np.linspace(0, 3, 40)), *(2 - np.exp(np.linspace(0, 0.6, 40)))]

    def levels(decisions, heard):
        for step, loss in enumerate(heard):
            decisions.turn(step)
            decisions.turn(step)  # of another micro-batch
            yield decisions.now.level
            decisions.heard([loss])

    first, told = Decisions(RecallTuner(0.5), "speed of the loss"), []
    first.tell = lambda *decided: told.append(decided)
    chosen = list(levels(first, losses))
    assert {rule for rule, _, _ in told} == {LEVEL_RULE}
    assert chosen == list(levels(Decisions(RecallTuner(0.5), ""), losses))  # of the losses alone
    log = Recorded(((0, 1), *((at, value) for _, at, value in told)), 70)
    again = Decisions(RecallTuner(0.5), "speed of the loss")
    again.replay({LEVEL_RULE: [Recorded(), log]})
    assert list(levels(again, [0.0] * len(losses)))[:71] == chosen[:71]
    assert len(set(chosen[:71])) > 2


def test_equal_speeds_decide_nothing():
    speed = LossSpeed()
    assert [speed.heard(1.0) for _ in range(30)] == [0] * 30


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [pytest.param((), marks=pytest.mark.slow), (50,)])
def test_a_run_leaves_edges_out_and_goes_on_after_a_stop_as_one_that_was_not_stopped(tmp_path, monkeypatch, cuts):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    halo = {"halo": {}} if cuts else {}
    recipe = recipe_of({**MODEL, "recall": 0.5, "attention": "sparse"}, halo, steps=16)
    run = train(recipe, made(), cuts, tmp_path / "whole")
    first = train(recipe, made(), cuts, tmp_path / "cut", stop=8)
    then = train(recipe, made(), cuts, tmp_path / "cut")
    assert first["losses"] + then["losses"] == run["losses"]
    assert first["recall"] + then["recall"] == run["recall"]
    assert set(run["recall"]) <= {1.0, 0.875, 0.75, 0.625, 0.5}
    assert run["recall"][0] == 0.875
    exact = train(recipe_of({**MODEL, "attention": "sparse"}, halo, steps=16), made(), cuts)
    assert run["losses"][0] != exact["losses"][0]
    assert run["losses"][-1] < run["losses"][0]


def test_the_log_says_that_full_steps_leave_nothing_out():
    options = {"recall": 0.5, "attention": "interleaved", "interleave": 2}
    found = train(recipe_of({**MODEL, **options}, steps=4), made())["recall"]
    assert found[0] == 0.875
    assert found[1::2] == [1.0, 1.0]
    assert found[2] < 1


def test_a_run_follows_a_log_as_far_as_it_goes_and_decides_beyond():
    recipe = recipe_of({**MODEL, "recall": 0.5, "attention": "sparse"}, steps=16)

    def run(log):
        workload, found = GraphWorkload(recipe, made()), []
        plan = plan_of(recipe, workload, ())
        setting = RankSetup(recipe, plan, workload, launch.places(plan)[0], emit=lambda *_, **said: found.append(said))
        one = trainer.Trainer(setting, None)
        (decisions,) = one.built.context.decisions
        assert set(decisions.now.values) == {LEVEL_RULE}
        told = []
        decisions.tell = lambda *decided: told.append(decided)
        decisions.replay({LEVEL_RULE: log})
        one.run(None)
        one.built.close()
        return [said["recall"] for said in found if "recall" in said], told

    recall, told = run([])
    decided = {0: 1, **{step: level for _, step, level in told}}
    assert len(decided) > 1
    assert recall == [1 - decided[max(one for one in decided if one <= step)] / 8 for step in range(16)]
    followed, _ = run([Recorded(((0, 4), (6, 0)), 8)])
    assert followed[:9] == [0.5] * 6 + [1.0] * 3


@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_edges_that_may_go_are_a_rule_of_the_plan_whose_start_and_bounds_are_those_of_the_run(bound):
    recipe = recipe_of({**MODEL, "recall": bound, "attention": "sparse"}, steps=16)
    workload = GraphWorkload(recipe, made())
    plan = decide.decide(request_from_recipe.of_recipe(recipe, lambda: workload), machines(1, 0)).taken
    rules = [one for one in plan.rules if one.name == LEVEL_RULE]
    said = [one for one in plan.why if "model.recall" in one]
    if bound == 1:
        assert not rules
        assert not said
        return
    (rule,), tuner = rules, RecallTuner(bound)
    assert rule.start == tuner.values[LEVEL_RULE]
    ends = [tuner.turned({LEVEL_RULE: level}).recall for level in (-9, int(rule.low), int(rule.high), 99)]
    assert ends == [1, 1, bound, bound]
    assert said == [
        "Attention: training steps leave edges out; recall begins at 0.875 and follows how fast the loss changes, from "
        "1 to 0.5 (model.recall); see the log."
    ]
    assert plans.loads(plans.dumps(plan)) == plan


def test_a_step_is_the_same_whether_its_batch_was_made_ahead_or_when_it_was_needed(monkeypatch):
    @contextlib.contextmanager
    def at_once(numbers, make, finish, waiting=None):
        def each():
            number = next(numbers, None)
            while number is not None:
                found = finish(make(number))
                number = next(numbers, None)
                yield found, 0.0

        yield each()

    recipe = recipe_of({**MODEL, "recall": 0.5, "attention": "sparse"}, steps=16)
    before = train(recipe, made())
    monkeypatch.setattr(trainer, "ahead", at_once)
    found = train(recipe, made())
    assert found["losses"] == before["losses"]
    assert found["recall"] == before["recall"]
    assert len(set(found["recall"])) > 1


@pytest.mark.parametrize(
    ("options", "told"), [({"recall": 0.0}, "recall = 0.0"), ({"recall": 0.9, "attention": "full"}, "full")]
)
def test_recall_without_meaning_is_refused(options, told):
    with pytest.raises(UserError, match=told):
        recipe_of({**MODEL, **options})
