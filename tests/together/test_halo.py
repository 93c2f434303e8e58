"""Parts of a graph over ranks with what they meet in a run: MaxK, CBM, int8 gradients, sharded states, a rank that is
killed while rows are late, fewer ranks afterwards."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import struck
from struck import Struck, same

from espalier.graph.data.graph import DataSplit, Graph
from espalier.graph.networks import graph_plan
from espalier.graph.workload import GraphWorkload
from espalier.launch.ranks import agent
from espalier.mechanisms.halo_exchange.quantized_exchange import Sylvie
from espalier.mechanisms.halo_exchange.state import HaloAge, HaloExchangeState
from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.plan import base as plans
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import Interrupted, UserError
from espalier.train import rank_spec as launch
from espalier.train import table, trainer, worker
from espalier.train.rank_setup import RankSetup
from many_ranks.faults import Fault

STEPS = 8


def graph_of(nodes=240, edges=1400) -> Graph:
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, nodes)
    features = random.normal(size=(nodes, 12)) + 2 * np.eye(4, 12)[labels]
    order = random.permutation(nodes)
    split = DataSplit(*(np.sort(one) for one in (order[:120], order[120:180], order[180:])))
    ends = random.integers(0, nodes, (2, edges))
    return Graph.from_edges(*ends, features=features, labels=labels, parts=split, undirected=True)


def recipe_of(model=None, halo=None, graph=None, precision="fp64", **tables):
    table = {
        "model": {"kind": "gcn", "depth": 2, "width": 32, "dropout": 0.0, **(model or {})},
        "data": {"path": "made"},
        "graph": {"halo": halo or {}, **(graph or {})},
        "train": {"steps": STEPS, "precision": precision},
        **tables,
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def plan_of(recipe, ranks, items=120, **changes):
    ends = [items * one // ranks for one in range(ranks + 1)]
    shares = tuple(plans.Rank(share=(ends[one], ends[one + 1])) for one in range(ranks))
    return plans.Plan(ranks=shares, micro_batch=items, precision=recipe.train.precision, **changes)


def losses(recipe, graph, ranks, **changes):
    workload = GraphWorkload(recipe, graph)
    plan = plan_of(recipe, ranks, **changes)

    def life(place):
        found = []
        with worker.joined(place, 60.0) as channel:
            setting = RankSetup(
                recipe, plan, workload, place, emit=lambda event, **fields: found.append((event, fields))
            )
            made = trainer.Trainer(setting, channel)
            made.run()
            made.built.close()
        return [fields["loss"] for event, fields in found if event == "step"]

    places = launch.places(plan)
    return agent.run(life, places)[0] if ranks > 1 else life(places[0])


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of()


@pytest.fixture(scope="module")
def alone(graph):
    return losses(recipe_of(), graph, 1)


def test_int8_gradients_stay_near_exact_ones_beside_rows_of_one_bit(graph):
    exchange = plans.Exchange(traffic="gradients", codec="int8")
    recipe = recipe_of({"width": 512}, {"bits": 1}, precision="fp32")
    plain, found = losses(recipe, graph, 2), losses(recipe, graph, 2, exchanges=(exchange,))
    assert found == pytest.approx(plain, rel=0.05)
    assert found != plain


def test_sharded_optimizer_states_change_nothing(graph, alone):
    unit = plans.Unit(optimizer=(0, 1))
    assert losses(recipe_of(), graph, 2, units=(unit,)) == pytest.approx(alone, rel=1e-9)


def test_kept_columns_cross_with_few_bits(graph):
    model = {"activation": "maxk", "k": 8}
    exact = losses(recipe_of(model), graph, 1)
    assert losses(recipe_of(model), graph, 3) == pytest.approx(exact, rel=1e-9)
    few = losses(recipe_of(model, {"bits": 4}, precision="fp32"), graph, 3)
    assert few == pytest.approx(exact, rel=0.1)


def test_each_rank_compresses_its_part_where_rows_are_alike(monkeypatch, tmp_path):
    """Cliques of forty nodes, none in one part alone."""
    made = graph_of(edges=1)
    nodes = np.arange(240)
    ends = (nodes[:, None] + 6 * np.arange(1, 40)) % 240
    sources = np.concatenate([np.repeat(nodes, 39), made.indices])
    cliques = Graph.from_edges(
        sources,
        np.concatenate([ends.ravel(), np.repeat(nodes, np.diff(made.indptr))]),
        features=made.features,
        labels=made.labels,
        parts=made.parts,
        undirected=True,
    )
    formats, inner = tmp_path / "formats", graph_plan.formatted

    def formatted(*given):
        with formats.open("a") as file:
            file.write(f"{(said := inner(*given))[:11]}\n")
        assert ("compressed" in given[0].forms.known) == ("CBM" in said)
        return said

    monkeypatch.setattr(graph_plan, "formatted", formatted)
    plain = losses(recipe_of(graph={"format": "csr"}), cliques, 1)
    formats.write_text("")
    assert losses(recipe_of(graph={"format": "cbm"}), cliques, 2) == pytest.approx(plain, rel=1e-9)
    found = formats.read_text().splitlines()
    assert set(found) == {"Format: CBM"}
    assert len(found) >= 2


@pytest.mark.parametrize(("changes", "named"), [("rounds", "replicas differ"), ("compile", "compiles")])
def test_what_cannot_stand_beside_parts_is_refused_with_the_reason(changes, named):
    recipe = recipe_of(**({"sync": {"kind": "co2"}} if changes == "rounds" else {}))
    more = (
        {"choices": {"local_rounds": LocalRoundsState(replicas=((0,), (1,)))}}
        if changes == "rounds"
        else {"compile": True}
    )
    with pytest.raises(UserError, match="halo") as told:
        table.ordered(recipe, plan_of(recipe, 2, **more))
    assert named in str(told.value)


@pytest.fixture
def strike(graph, monkeypatch, tmp_path):
    """Runs a supervised run of two ranks on the graph."""
    monkeypatch.setattr(struck, "open_language", lambda recipe: GraphWorkload(recipe, graph))

    def run(halo, name, *faults, ranks=2, model=None, steps=STEPS, ages=(), memory=1 << 26, every=3, **options):
        train = {"steps": steps, "precision": "fp32"}
        recipe = recipe_of(model or {"kind": "sage"}, halo, checkpoint={"every": every}, train=train)
        return Struck(
            recipe,
            ranks,
            tmp_path / name,
            faults,
            plan=plan_of(recipe, ranks, choices={"halo_exchange": HaloExchangeState(halo_ages=ages)}),
            memory=memory,
            **options,
        ).run()

    return run


@pytest.mark.extremes
@pytest.mark.parametrize("halo", [pytest.param({}, marks=pytest.mark.slow), {"bits": 1}])
def test_a_rank_that_is_killed_in_an_exchange_changes_no_bit(strike, halo):
    whole = strike(halo, "whole")
    inside = {"inside": (Sylvie, "_launch")} if halo else {}
    run = strike(halo, "run", Fault(1, 5, "kill"), **inside)
    assert same(run, whole)
    assert run.all("recovered")[0]["step"] > 0


@pytest.mark.slow
def test_a_rank_of_a_graph_transformer_that_is_killed_changes_no_bit_also_of_the_recall_that_follows_losses(strike):
    sizes = {"kind": "graph-transformer", "width": 16, "heads": 4, "feed_forward": 16}
    model = {**sizes, "recall": 0.5, "attention": "sparse"}
    whole = strike({}, "whole", model=model)
    run = strike({}, "run", Fault(1, 5, "kill"), model=model)
    assert same(run, whole)
    assert run.all("recovered")[0]["step"] > 0


def interrupted(strike, monkeypatch, halo, name, **options):
    """The same run, after whose 20th step somebody presses Ctrl-C."""

    def press(faults, rank, step, folder):
        if (rank, step) == (1, 20):
            os.kill(os.getppid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(struck, "strike", press)
        with pytest.raises(Interrupted):
            strike(halo, name, **options)


LATE = {
    "late": ({"bits": 4, "synchronize": 0, "late": True}, ()),
    "late, whole": ({"bits": 32, "synchronize": 5, "late": True}, ()),
    "late by machine": ({"bits": 4, "synchronize": 0, "late": True, "staleness": 3}, (HaloAge(nodes=(0, 0), steps=3),)),
    "late differences": ({"bits": 1, "synchronize": 3, "late": True, "delta": True}, ()),
    "differences": ({"bits": 1, "delta": True}, ()),
    "late by the loss": ({"bits": 1, "synchronize": 5, "late": True, "adapt": True}, ()),
}
SLOW = {"late, whole", "late differences", "late by the loss"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", [pytest.param(0, marks=pytest.mark.slow), 1 << 26])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in LATE])
def test_a_rank_that_is_killed_while_rows_are_late_changes_no_bit(strike, kind, memory):
    halo, ages = LATE[kind]
    options = {"ages": ages, "memory": memory, "every": 100 if memory else 3}
    whole = strike(halo, "whole", **options)
    run = strike(halo, "run", Fault(1, 8, "kill"), inside=(Sylvie, "_launch"), **options)
    assert same(run, whole)
    (recovered,) = run.all("recovered")
    assert recovered["step"] >= 3
    assert recovered["source"] == ("memory" if memory else "disk")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_while_rows_are_late_goes_on_with_the_same_bits(strike, ranks):
    halo, ages = LATE["late by machine"]
    whole = strike(halo, "whole", ranks=ranks, ages=ages)
    run = strike(halo, "run", ranks=ranks, ages=ages, stop_after=5, memory=0)  # saved, and started again
    assert same(run, whole)
    (recovered,) = run.all("recovered")
    assert (recovered["step"], recovered["source"]) == (5, "disk")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", ["kill", "terminate", "interrupt"])
def test_signals_to_a_rank_and_to_the_run_change_no_bit_of_late_rows(strike, what, ranks, monkeypatch, tmp_path):
    halo, ages = LATE["late by machine"]
    options = {"ranks": ranks, "ages": ages, "steps": 60}
    whole = strike(halo, "whole", **options)
    if what != "interrupt":
        run = strike(halo, "run", Fault(1, 20, what), **options)
        assert run.all("recovered")[0]["step"] > 0
    else:
        interrupted(strike, monkeypatch, halo, "run", **options)
        run = strike(halo, "run", **options)
        assert 20 <= run.all("run")[-1]["step"] < 60
    assert same(run, whole)


def test_late_rows_of_other_parts_are_left_out_and_the_run_goes_on(strike):
    strike({"bits": 4, "synchronize": 0, "late": True}, "run", steps=5)
    run = strike({"bits": 2, "synchronize": 0, "late": True, "delta": True}, "run")
    assert [event["step"] for event in run.all("step")] == list(range(1, STEPS + 1))
    assert run.losses[STEPS] < run.losses[1]


def test_no_rank_takes_the_state_of_another_where_rows_are_late():
    for halo, stays in (({}, "alike"), ({"synchronize": 2, "late": True}, ""), ({"bits": 1, "delta": True}, "")):
        recipe = recipe_of(halo=halo)
        assert table.recovery(recipe, plan_of(recipe, 2)) == stays


def test_bits_that_follow_losses_are_in_the_log_and_steps_that_are_made_again_have_them(strike):
    run = strike({"bits": 1, "synchronize": 2, "late": True, "adapt": True}, "run", Fault(1, 21, "kill"), steps=24)
    assert 0 < run.all("recovered")[0]["step"] < 24
    decided = {"graph.halo.bits": {}, "graph.halo.late": {}}
    for event in run.all("rule"):
        if event["name"] in decided:
            decided[event["name"]][event["step"]] = event["value"]
    assert len(decided["graph.halo.bits"]) > 1
    assert decided["graph.halo.bits"][0] == decided["graph.halo.late"][0] == 1
    for event in run.all("step"):
        known = decided["graph.halo.bits"]
        assert event["halo"]["bits"] == known[max(step for step in known if step < event["step"])]


def test_a_run_of_three_ranks_goes_on_with_two_and_its_losses_are_near_those_of_three(strike, monkeypatch):
    """One bit and late rows: the two ranks begin with fresh rows from the checkpoint of the three. Other rows are
    rounded then, and fewer: losses are those of three ranks that were not stopped within a tenth, or 0.03."""
    halo, options = {"bits": 1, "synchronize": 4, "late": True}, {"steps": 60}
    whole = strike(halo, "whole", ranks=3, **options)
    interrupted(strike, monkeypatch, halo, "run", ranks=3, **options)
    run = strike(halo, "run", ranks=2, **options)
    step = run.all("run")[-1]["step"]
    assert 20 <= step < 60
    assert [event["step"] for event in run.all("step")] == list(range(1, 61))
    assert [run.losses[at] for at in range(1, step + 1)] == [whole.losses[at] for at in range(1, step + 1)]
    assert run.losses == pytest.approx(whole.losses, rel=0.1, abs=0.03)
    assert run.losses != whole.losses
    assert run.losses[60] < run.losses[1]
