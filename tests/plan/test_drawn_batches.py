"""Whole graph or drawn batches: the plan takes what passes over the training nodes faster, and the run does it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from tests.story.programs import forked, launched

from espalier import make_plan
from espalier.cli import main as cli
from espalier.cli.run_plan import batches_of
from espalier.graph.sampling import batch_strategy as batching
from espalier.mechanisms.disk_batches import drawn_batches
from espalier.mechanisms.halo_exchange import halo_parallel
from espalier.plan import base as plans
from espalier.recipe.graphs import Batches
from espalier.recipe.units import show_seconds

HOST = '[[nodes]]\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\ncount = {}\n'
LINK = '[links]\nbetween = {{ bandwidth = "{}", latency = "{}", launch = "{}" }}\n'
FAST, SLOW = ("10Gbit/s", "20us", "5us"), ("2Mbit/s", "1ms", "100us")
MANY = "planted:nodes=6000,degree=20,features=16,classes=4,homophily=0.97"
"""Most nodes are trained on, and few edges leave a cluster."""
FEW = "planted:nodes=6000,degree=30,features=64,classes=4,train=0.003"
"""A few nodes are trained on, whose neighbourhoods are a small part of the graph."""


def recipe(home: Path, path: str, *more: str) -> Path:
    (home / "recipe.toml").write_text(
        f'name = "it"\n[model]\nkind = "sage"\nwidth = 64\n[data]\npath = "{path}"\n[graph]\nfanout = "auto"\n'
        + "[train]\nsteps = 4\nvalidate_every = 2\n[plan]\ntrial = false\n"
        + "\n".join(more)
    )
    return home / "recipe.toml"


def cluster(home: Path, hosts: int, link: tuple[str, str, str] = FAST) -> Path:
    (home / "hosts.toml").write_text(HOST.format(hosts) + LINK.format(*link))
    return home / "hosts.toml"


def said(plan: plans.Plan) -> str:
    (found,) = (one for one in plan.why if one.startswith("Batches: "))
    return found


def test_parts_are_taken_where_their_boundary_is_small_and_drawn_batches_where_few_nodes_are_trained_on(tmp_path):
    cut = make_plan(recipe(tmp_path, MANY), cluster(tmp_path, 4))
    assert batches_of(cut) == Batches()
    assert len(cut.ranks) == 4
    assert cut.predicted is not None
    assert cut.predicted.sent_bytes["halo"] > 0
    assert "graph.fanout=[10, 10] train.batch_tokens=1024" in said(cut)
    drawn = make_plan(recipe(tmp_path, FEW), cluster(tmp_path, 4))
    assert batches_of(drawn) is not None
    assert batches_of(drawn).fanout == (10, 10)
    assert drawn.predicted is not None
    assert "halo" not in drawn.predicted.sent_bytes
    assert "the recipe's 4 steps are passes" in said(drawn)
    slow = make_plan(recipe(tmp_path, MANY), cluster(tmp_path, 4, SLOW))
    assert batches_of(slow) == Batches()
    assert len(slow.ranks) == 1
    assert any("one rank has the whole graph" in one for one in slow.why)


@pytest.mark.slow
def test_over_a_slow_link_parts_are_taken_where_their_boundary_is_small_and_one_machine_where_it_is_large(tmp_path):
    slow = cluster(tmp_path, 2, ("20Mbit/s", "200us", "50us"))
    graph = "planted:nodes=20000,degree=40,features=64,classes=4,homophily={}"
    small = make_plan(recipe(tmp_path, graph.format(0.999)), slow)
    assert (batches_of(small), len(small.ranks)) == (Batches(), 2)
    assert small.predicted is not None
    assert 0 < small.predicted.terms["halo"] < 0.2 * small.predicted.step_seconds
    large = make_plan(recipe(tmp_path, graph.format(0.3)), slow)
    assert (batches_of(large), len(large.ranks)) == (Batches(), 1)
    assert any("over 2 ranks a step would take" in one for one in large.why)


@pytest.mark.parametrize(
    ("batch", "step", "drawn"),
    [(157, 0.1, True), (157, 6.0, True), (157, 6.5, False), (1, 9.0, True), (1, 11.0, False)],
)
def test_what_reaches_an_accuracy_sooner_is_taken_by_steps_and_by_passes_where_these_are_few(batch, step, drawn):
    """The whole graph takes 10 s a step, 610 s to the accuracy: as long as 96 batches of 6.35 s."""

    class Planned(NamedTuple):
        step_seconds: float
        trainers: tuple[int, ...] = (0,)

    batches = Batches((10, 10), 1024, batch)
    asked = SimpleNamespace(train=SimpleNamespace(steps=4))
    chosen, why = drawn_batches.choose(
        asked, batches, lambda one: Planned(step if one.fanout else 10.0), lambda one, plan: None
    )
    assert bool(chosen.fanout) == drawn
    spent = f"{show_seconds(610.0)} and {show_seconds(min(96, 61 * batch) * step)}"
    assert f"{spent}, assumed 61 steps of the whole graph" in why


def test_named_machines_have_a_rank_each_and_no_plan_of_one(tmp_path):
    named = "".join(f'[[nodes]]\nname = "h{one}"\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\n' for one in range(2))
    (tmp_path / "named.toml").write_text(named + LINK.format(*SLOW))
    plan = make_plan(recipe(tmp_path, FEW), tmp_path / "named.toml")
    assert len(plan.ranks) == 2


def test_without_halos_each_machine_passes_over_the_whole_graph_and_the_plan_says_what_cuts_it(tmp_path, monkeypatch):
    """As `espalier train examples/graph.toml --hosts a,b`: what a recipe leaves out is not chosen for it."""
    named = "".join(f'[[nodes]]\nname = "h{one}"\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\n' for one in range(2))
    (tmp_path / "named.toml").write_text(named + LINK.format(*FAST))
    written = recipe(tmp_path, MANY)
    whole = written.read_text().replace('[graph]\nfanout = "auto"\n', "")
    written.write_text(whole)
    plan = make_plan(written, tmp_path / "named.toml")
    assert len(plan.ranks) == 2
    assert "halo" not in plan.predicted.sent_bytes
    (said,) = (one for one in plan.why if "each of 2 ranks passes over the whole graph in every step, in" in one)
    assert not any("passes over the whole graph" in one for one in make_plan(written, cluster(tmp_path, 1)).why)
    alone = make_plan(written, cluster(tmp_path, 4))  # one rank of four machines, which parts would use
    assert len(alone.ranks) == 1
    assert any("one rank passes over the whole graph" in one and "on 4 ranks" in one for one in alone.why)
    monkeypatch.setattr(batching, "LARGE", 1000)
    (large,) = (one for one in make_plan(written, tmp_path / "named.toml").why if "passes over the whole graph" in one)
    assert "graph.fanout=auto chooses between parts, drawn batches and one rank." in large
    assert "estimate" not in large
    monkeypatch.undo()
    written.write_text(whole.replace("[train]", "[graph.halo]\n[train]"))
    cut = make_plan(written, tmp_path / "named.toml")
    assert cut.predicted.sent_bytes["halo"] > 0
    assert not any("passes over the whole graph" in one for one in cut.why)
    assert cut.predicted.step_seconds < plan.predicted.step_seconds
    assert f"with [graph.halo] {show_seconds(cut.predicted.step_seconds)} on 2 ranks" in said
    written.write_text(whole.replace("[train]", "[graph]\nfanout = [10, 10]\n[train]\nbatch_tokens = 1024"))
    drawn = make_plan(written, tmp_path / "named.toml")
    seconds = show_seconds(-(-4800 // 1024) * drawn.predicted.step_seconds)
    assert f"with graph.fanout=[10, 10] train.batch_tokens=1024 {seconds} on 2 ranks" in said


def steps(folder: Path) -> list[tuple[int, float]]:
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [(one["step"], one["loss"]) for one in events if one["event"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "pins"), [(FEW, "drawn"), pytest.param(MANY, "parts", marks=pytest.mark.slow)])
def test_the_run_does_what_was_chosen_as_if_it_had_been_asked_for_and_keeps_it_when_it_goes_on(
    tmp_path, monkeypatch, path, pins
):
    """Also with one rank. A pass over batches of four nodes has several, which are slower here than they are told."""
    if pins == "drawn":
        monkeypatch.setattr(halo_parallel, "SAMPLED", 4)
        choose = drawn_batches.choose

        def seconds(batches, plan):
            return 0.1 if batches.fanout else 1.0

        monkeypatch.setattr(
            drawn_batches, "choose", lambda recipe, drawn, planned, tried: choose(recipe, drawn, planned, seconds)
        )
    asked = recipe(tmp_path, path, "pin = { ranks = 2, threads = 1 }").name
    cluster(tmp_path, 1)
    more = ["plan.cluster=hosts.toml"]
    assert forked(tmp_path, "train", asked, *more, "--run", "open").returncode == 0
    plan = plans.read(tmp_path / "open" / "plan.json")
    chosen = batches_of(plan)
    assert chosen is not None
    assert bool(chosen.fanout) == (pins == "drawn")
    if pins == "drawn":
        size, each = chosen.batch_tokens, chosen.steps
        assert each > 1
        taken = [f"graph.fanout={list(chosen.fanout)}", f"train.batch_tokens={size}", f"train.steps={4 * each}"]
        taken.append(f"train.validate_every={2 * each}")
    else:
        taken = ["graph.fanout=[]", "graph.halo.bits=32"]
    done = forked(tmp_path, "train", asked, *more, *taken, "--run", "pinned")
    assert done.returncode == 0, done.stderr
    assert steps(tmp_path / "open") == steps(tmp_path / "pinned")
    sent = [json.loads(line) for line in (tmp_path / "open" / "events.jsonl").read_text().splitlines()]
    ledger = [one["bytes"] for one in sent if one["event"] == "step"][-1]
    assert plan.predicted is not None
    assert ledger["gradients"] > 0
    for name in ("halo", "gradients"):
        assert ledger.get(name, 0) == pytest.approx(plan.predicted.sent_bytes.get(name, 0), rel=0.01)
    done = forked(tmp_path, "train", asked, *more, "train.steps=6", "plan.pin.ranks=1", "--run", "open")
    assert done.returncode == 0, done.stderr
    assert batches_of(plans.read(tmp_path / "open" / "plan.json")) == chosen
    assert [step for step, _ in steps(tmp_path / "open")] == list(range(1, 6 * chosen.steps + 1))


@pytest.mark.slow
def test_parts_and_drawn_batches_are_tried_in_real_ranks_before_one_is_chosen(tmp_path):
    asked = recipe(tmp_path, FEW, "pin = { ranks = 2, threads = 1 }")
    asked.write_text(asked.read_text().replace("trial = false", "trial = true"))
    cluster(tmp_path, 1)
    done = forked(tmp_path, "train", asked.name, "plan.cluster=hosts.toml", "--run", "tried")
    assert done.returncode == 0, done.stderr
    plan = plans.read(tmp_path / "tried" / "plan.json")
    assert said(plan).endswith("; measured.")
    (file,) = tmp_path.rglob("trials.json")
    of = {name.partition("/")[0]: seconds for name, seconds in json.loads(file.read_text()).items() if seconds}
    assert len(of) == 2  # recipes: that of parts, and that of drawn batches
    assert forked(tmp_path, "plan", asked.name, "plan.cluster=hosts.toml").stdout.count(said(plan)) == 1


def test_ranks_of_a_launcher_hear_what_the_first_has_chosen(tmp_path):
    asked = recipe(tmp_path, FEW).name
    cluster(tmp_path, 1)
    run = partial(cli.main, ["train", asked, "plan.cluster=hosts.toml", "--run", "both"])
    for done in launched(tmp_path, run, ranks=2):
        assert done.returncode == 0, done.stderr
    chosen = batches_of(plans.read(tmp_path / "both" / "plan.json"))
    assert chosen is not None
    assert [step for step, _ in steps(tmp_path / "both")] == list(range(1, 4 * chosen.steps + 1))
