"""Training over parts of a graph: any number of ranks trains as one does, evaluates as one does, and goes on as one."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from tests.graph.conftest import made
from tests.graph.test_workload import STEPS, recipe_of

from espalier import recipe as config
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.comm.channel import Channel
from espalier.graph.data.graph import Graph
from espalier.graph.parts import coded_rows, halo, partition_folder
from espalier.graph.parts import graph_cut as graph_cutting
from espalier.graph.sampling.neighbor_sampler import Style
from espalier.graph.workload import GraphWorkload
from espalier.launch.ranks import agent
from espalier.machine import cluster as clusters_
from espalier.mechanisms.few_bits import quantization
from espalier.mechanisms.halo_exchange import choice, halo_parallel
from espalier.mechanisms.halo_exchange import halo_plan as halo_exchange
from espalier.mechanisms.halo_exchange.options import HaloOptions
from espalier.mechanisms.halo_exchange.quantized_exchange import Adaptive
from espalier.mechanisms.halo_exchange.state import HaloExchangeState
from espalier.plan import base as plans
from espalier.plan import decide, trials
from espalier.plan.ask import Ask
from espalier.plan.layout_decision import best_layout
from espalier.recipe.errors import UserError
from espalier.sparse.partition import clusters
from espalier.train import rank_spec as launch
from espalier.train import request_from_recipe, trainer, worker
from espalier.train.rank_setup import RankSetup
from many_ranks import ranks

HALO = {"bits": 32}


def plan_of(recipe, workload, cuts):
    """Ranks with the shares between `cuts`, in percent of the training nodes."""
    ends = [workload.global_batch * one // 100 for one in (0, *cuts, 100)]
    shares = tuple(plans.Rank(share=(a, b)) for a, b in itertools.pairwise(ends))
    return plans.Plan(ranks=shares, micro_batch=workload.global_batch, precision=recipe.train.precision)


def without_exchange(plain):
    """Fails where it waits for other ranks: a step that a lost rank holds up there is missing from the log."""

    def alone(*arguments):
        with mock.patch.object(Channel, "_end", side_effect=AssertionError("an exchange between a step and its line")):
            return plain(*arguments)

    return alone


def train(recipe, graph, cuts=(), folder=None, stop=None, nodes=(), **changes):
    """The events of rank 0. `nodes`: of the ranks; `changes`: of the plan."""
    workload = GraphWorkload(recipe, graph)
    plan = msgspec.structs.replace(plan_of(recipe, workload, cuts), **changes)
    placed = tuple(msgspec.structs.replace(one, node=at) for at, one in zip(nodes, plan.ranks, strict=False))
    plan = msgspec.structs.replace(plan, ranks=placed or plan.ranks)

    def life(place):
        found = {"losses": [], "validation": [], "halo": [], "sent": [], "adapted": [], "recall": []}

        def emit(event, **fields):
            if event == "step":
                found["losses"].append(fields["loss"])
                found["halo"].append(fields["bytes"].get("halo", 0))
                found["sent"].append(fields["bytes"].get("activations", 0))
                found["adapted"].append(fields.get("halo"))
                found["recall"].append(fields.get("recall"))
            if event == "validation":
                found["validation"].append({k: v for k, v in fields.items() if k not in ("step", "seconds")})

        with worker.joined(place, 90.0) as channel:
            setting = RankSetup(recipe, plan, workload, place, emit=emit, stop_after=stop)
            made = trainer.Trainer(setting, channel)
            made._report = without_exchange(made._report)
            saved = None
            if folder is not None:
                saved = Checkpoints(str(folder), group=worker.saving_group(made.mesh.trainers))
                made.restore(saved)
            try:
                made.run(saved)
                made.sample()
            except trainer.Interrupted:
                pass
            finally:
                made.built.close()
            if saved is not None:
                saved.wait()
        return found

    places = launch.places(plan)
    return agent.run(life, places)[0] if cuts else life(places[0])


def close(found, expected, rel):
    assert found["losses"] == pytest.approx(expected["losses"], rel=rel)
    assert len(found["validation"]) == len(expected["validation"]) > 0
    for one, other in zip(found["validation"], expected["validation"], strict=True):
        assert one == pytest.approx(other, rel=rel)


@pytest.mark.parametrize(
    "kind", ["gcn", "gat", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sage", "gin", "maxk"))]
)
def test_any_parts_train_and_validate_as_one_rank(kind):
    model = {"kind": "gcn", "activation": "maxk", "k": 3} if kind == "maxk" else {"kind": kind}
    alone = train(recipe_of(model), made())
    assert not sum(alone["halo"])
    recipe = recipe_of(model, {"halo": HALO})
    for cuts in [(50,), (10, 40)] if kind == "gcn" else [(20,)]:
        found = train(recipe, made(), cuts)
        close(found, alone, rel=1e-9)
        assert sum(found["halo"]) > 0


def sent_by_plan(recipe, cuts, nodes=60):
    """Bytes that rank 0 sends in a step, and of those the rows', of networks whose dtype has `size` bytes."""
    workload = GraphWorkload(recipe, made(nodes))
    shares = [one.share[1] - one.share[0] for one in plan_of(recipe, workload, cuts).ranks]
    size = 8 if recipe.train.precision == "fp64" else 4
    return workload.halos(), shares, workload.halos().step_bytes(shares, size)[0].sum()


@pytest.mark.parametrize("quant", ["a2q", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mega", "uniform"))])
def test_quantized_layers_over_parts_train_as_on_one_rank(quant):
    alone = train(recipe_of(quant={"kind": quant}), made())
    recipe = recipe_of(quant={"kind": quant}, graph={"halo": HALO})
    found = train(recipe, made(), (30,))
    close(found, alone, rel=1e-6)
    assert found["halo"][1:] == [sent_by_plan(recipe, (30,))[2]] * (STEPS - 1)


CODED = {
    "messages": ({}, {}, {}),
    "rows that are summed, dropped too": ({"kind": "gcn", "depth": 3, "dropout": 0.5}, {"kind": "a2q"}, {}),
    "rows of one width": ({"kind": "gin", "depth": 3}, {"kind": "uniform", "messages": 0}, {}),
    "attention": ({"kind": "gat", "heads": 2}, {"kind": "mega", "messages": 3}, {}),
    "late": ({"depth": 3}, {"kind": "a2q"}, {"synchronize": 0, "late": True}),
    "few bits of gradients": ({"kind": "sage", "depth": 3}, {"kind": "mega"}, {"bits": 2, "by_degree": True}),
}


OFTEN = ("messages", "attention", "few bits of gradients")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in OFTEN else pytest.mark.slow) for one in CODED])
def test_rows_cross_as_codes_with_the_same_result_in_the_bytes_of_the_plan(name, monkeypatch):
    model, quant, options = CODED[name]
    recipe = recipe_of(
        {"width": 16, **model}, {"halo": {**HALO, **options}}, {"kind": "a2q", **quant}, precision="fp32", steps=3
    )
    halos, shares, expected = sent_by_plan(recipe, (20, 60))
    found = train(recipe, made(), (20, 60))
    assert found["halo"][1:] == [expected] * 2
    assert "codes of [quant]" in halos.told(shares)
    if options.get("bits", 32) < 32:
        return
    monkeypatch.setattr(quantization, "_coded", lambda block, coding: block)
    floats = train(recipe, made(), (20, 60))
    assert found["losses"] == floats["losses"]
    assert found["validation"] == floats["validation"]
    assert found["halo"][1] < floats["halo"][1]


def test_a_row_of_codes_takes_its_bits_and_its_step():
    """One part to another, 64 columns to 7: forward 4 bits a value and a step for each column, back as it was."""
    recipe = recipe_of({"width": 64}, {"halo": HALO}, {"kind": "a2q"}, precision="fp32")
    halos, shares, _ = sent_by_plan(recipe, (50,))
    rows = halos.rows(shares)[0, 1]
    forward = halos.crossing_bytes(shares, 4, (1, False), 32)[0, 1]
    outputs = 3
    assert forward - 8 == (rows + 2) * -(-outputs * 4 // 8)  # a stamp, and 3 steps in two rows of 2 bytes
    deep = sent_by_plan(recipe_of({"width": 64, "depth": 3}, {"halo": HALO}, {"kind": "mega"}, precision="fp32"), (50,))
    learned = deep[0].crossing_bytes(shares, 4, (1, False), 32)[0, 1] - 8
    assert learned == rows * (64 + 1)
    assert learned < 0.26 * rows * 64 * 4


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_codes_of_rows_come_back_bit_for_bit_at_every_width(by_row, signed):
    random = torch.Generator().manual_seed(0)
    for bits in range(2 if signed else 1, 9):
        most = (1 << bits - 1) - 1 if signed else (1 << bits) - 1
        codes = torch.randint(-most if signed else 0, most + 1, (6, 5), generator=random)
        steps = torch.randint(0, 256, (6 if by_row else 5,), generator=random, dtype=torch.uint8)
        for kind in (torch.float32, torch.float64, torch.bfloat16):
            coding = coded_rows.Coding(bits, steps, by_row, signed, 1.0 if by_row else 4 / 3)
            unit = coding.unit(steps).to(kind)
            rows = codes.to(kind) * (unit[:, None] if by_row else unit)
            beside = torch.randn(6, 0 if by_row else 2, generator=random).to(kind)
            rows, out = torch.cat([rows, beside], 1), torch.zeros(6, 5 + beside.shape[1], dtype=kind)
            lines = coding.encoded(rows, steps)
            assert lines.shape == (6, coding.size(rows.shape[1], rows.element_size()).bytes)
            coding.decode(lines, steps, out)
            assert torch.equal(out, rows)


def test_a_row_that_codes_cannot_say_is_named():
    graph = made()
    seen = halo.Halo.of(
        graph.indptr, graph.indices, halo.boundary(graph.indptr, graph.indices, np.arange(60) % 2, 2), 0
    )
    leaving, at = torch.zeros(len(seen.leaves), 3), halo.Crossing(1, False)
    leaving[4, 2] = torch.nan
    coding = coded_rows.Coding(4, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(UserError, match=f"Rank 0 cannot send the row of node {seen.owned[seen.leaves[4]]} for layer 2"):
        halo.send_codes(seen, coding, leaving, torch.zeros(len(seen.outer), 3), at)


def test_fp32_and_labels_on_few_ranks_train_as_one_rank():
    """All training nodes are in one cluster, so that some rank has none."""
    graph = made()
    parts = clusters(graph.indptr, graph.indices, 3)
    order = np.argsort(parts, kind="stable")
    assert graph.parts is not None
    split = type(graph.parts)(*(np.sort(one) for one in (order[:12], order[12:30], order[30:])))
    graph = Graph(**{**vars(graph), "parts": split})
    alone = train(recipe_of(precision="fp32"), graph)
    close(train(recipe_of(graph={"halo": HALO}, precision="fp32"), graph, (33, 66)), alone, rel=1e-5)


def hubs() -> Graph:
    """Two nodes that hear from everybody, and everybody from them."""
    graph = made(edges=80)
    assert graph.parts is not None
    others = np.arange(2, 60)
    ends = np.concatenate([np.stack([graph.indices, graph.targets()]), [others, others % 2]], 1)
    return Graph.from_edges(*ends, features=graph.features, labels=graph.labels, parts=graph.parts, undirected=True)


@pytest.mark.parametrize("kind", ["gcn", pytest.param("sage", marks=pytest.mark.slow), "gin"])
def test_sums_cross_around_hubs_and_train_as_one_rank(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graph_cutting, "PAYS", 1.0)  # in so small a graph METIS leaves little to save
    graph = hubs()
    alone = train(recipe_of({"kind": kind}), graph)
    recipe = recipe_of({"kind": kind}, {"halo": HALO})
    found = train(recipe, graph, (50,))
    close(found, alone, rel=1e-8)  # GCN's scales are float32, and multiplied in another order
    workload = GraphWorkload(recipe, graph)
    halos = workload.halos()
    assert halos is not None
    shares = [one.share[1] - one.share[0] for one in plan_of(recipe, workload, (50,)).ranks]
    cut, every = halos.cutting.boundary(halos.cutting.parts(shares), 2)
    assert every is not None
    assert halos.rows(shares).sum() < cut.rows.sum()
    assert found["halo"][1] == halos.step_bytes(shares, 8)[0].sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"bits": 2, "synchronize": 2, "late": True}])
def test_bf16_rows_and_sums_cross_too(options, monkeypatch, tmp_path):
    """To two roundings of bf16. Two bits change losses by a seventh, from the first step on and in fp32 alike."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graph_cutting, "PAYS", 1.0)
    graph, model = hubs(), {"kind": "sage", "depth": 3}
    alone = train(recipe_of(model, precision="fp32"), graph)
    exact, found = (
        train(recipe_of(model, {"halo": options}, precision=one), graph, (50,))["losses"] for one in ("fp32", "bf16")
    )
    assert found == pytest.approx(exact, rel=2**-7)
    assert exact == pytest.approx(alone["losses"], rel=0.15 if options else 1e-5)


def test_inductive_training_hides_edges_from_parts_too():
    alone = train(recipe_of(graph={"inductive": True}), made())
    close(train(recipe_of(graph={"inductive": True, "halo": HALO}), made(), (50,)), alone, rel=1e-9)


def test_a_checkpoint_goes_on_with_another_number_of_parts(tmp_path):
    recipe = recipe_of({"kind": "sage"}, {"halo": HALO})
    whole = train(recipe, made(), (50,), tmp_path / "whole")
    first = train(recipe, made(), (30, 60), tmp_path / "cut", stop=2)
    for cuts in [(), (40,)]:
        folder = tmp_path / f"again {len(cuts)}"
        shutil.copytree(tmp_path / "cut", folder)
        then = train(recipe, made(), cuts, folder)
        assert first["losses"] + then["losses"] == pytest.approx(whole["losses"], rel=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [pytest.param("gcn", marks=pytest.mark.slow), "gat", "maxk"])
def test_bytes_of_a_step_are_those_of_the_plan(kind):
    model = {"activation": "maxk", "k": 3} if kind == "maxk" else {"kind": kind}
    every = [({}, "fp32"), ({"bits": 2}, "fp32"), ({}, "bf16")]
    every += [({"synchronize": 0, "late": True}, "fp32"), ({"bits": 2}, "bf16")] if kind != "maxk" else []
    for options, precision in every:
        recipe = recipe_of({**model, "depth": 3}, {"halo": options}, precision=precision)
        halos, shares, _ = sent_by_plan(recipe, (20, 60))
        leaving = halos.step_bytes(shares, halos.value_bytes(precision)).sum(1)
        assert train(recipe, made(), (20, 60))["halo"][1:] == [leaving[0]] * (STEPS - 1)


def machines(count, mbit):
    node = f'[[nodes]]\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\ncount = {count}\n'
    return clusters_.loads(node + (f'[links]\nbetween = "{mbit}Mbit/s"\n' if count > 1 else ""))


def asked(options, ranks):
    recipe = recipe_of({"width": 64, "depth": 3}, {"halo": options}, precision="fp32")
    recipe = msgspec.structs.replace(recipe, plan=config.Planning(pin=config.Pin(ranks=ranks)))
    workload = GraphWorkload(recipe, made(nodes=600, edges=4000))
    return request_from_recipe.of_recipe(recipe, lambda: workload)


def over_machines(options):
    """The plan of three ranks, and the same on three machines."""
    request = asked(options, 3)
    here = decide.decide(request, machines(1, 0)).taken
    bare = msgspec.structs.replace(
        here, ranks=tuple(msgspec.structs.replace(one, node=at) for at, one in enumerate(here.ranks))
    )
    terms = {name: value for name, value in here.predicted.terms.items() if name != "halo"}
    predicted = msgspec.structs.replace(here.predicted, terms=terms, step_seconds=sum(terms.values()))
    bare = msgspec.structs.replace(bare, why=(), predicted=predicted)
    return (
        request.profile.facts["halo_exchange"],
        here,
        halo_exchange.with_halos(bare, request.profile.facts["halo_exchange"], machines(3, 1)),
    )


def test_the_plan_says_what_crosses_each_link_how_long_it_takes_and_when_one_rank_is_faster():
    halos, here, plan = over_machines({})
    shares = [one.share[1] - one.share[0] for one in plan.ranks]
    sent = halos.step_bytes(shares, 4).sum(1).max()
    assert plan.predicted.sent_bytes["halo"] == here.predicted.sent_bytes["halo"] == sent
    assert plan.predicted.terms["halo"] == pytest.approx(sent / (1e6 / 8), rel=0.01)
    assert plan.predicted.step_seconds == pytest.approx(sum(plan.predicted.terms.values()))
    assert here.micro_batch == plan.micro_batch == max(shares)
    said = "\n".join(plan.why)
    assert "cut into 3 parts" in said
    assert "over 1 Mbit/s between machines" in said
    assert "one rank would be faster" in said
    assert "graph.halo.bits=1" in said
    *_, low = over_machines({"bits": 1, "synchronize": 5, "late": True})
    assert low.predicted.terms["halo"] < 0.1 * plan.predicted.terms["halo"]
    assert any("rows are one step late, and every 5th step waits" in one for one in low.why)


def every(halos, bits):
    """All crossings with so many bits, or the bits [ranks, ranks]."""
    return {key: np.broadcast_to(bits, (3, 3)) for key in halos.counts([1, 1, 1])}


def test_links_carry_the_bits_that_they_have_time_for():
    halos = asked({"bits": "auto"}, 3).profile.facts["halo_exchange"]

    def bits(mbit, computing, nodes=(0, 1, 2), synchronize=1):
        known = dataclasses.replace(halos, options=msgspec.structs.replace(halos.options, synchronize=synchronize))
        here = decide.decide(asked({}, 3), machines(1, 0)).taken
        ranks = tuple(msgspec.structs.replace(one, node=at) for at, one in zip(nodes, here.ranks, strict=True))
        predicted = msgspec.structs.replace(here.predicted, terms={"forward": computing}, step_seconds=computing)
        plan = msgspec.structs.replace(here, ranks=ranks, why=(), predicted=predicted)
        plan = halo_exchange.with_halos(plan, known, machines(len(set(nodes)), mbit))
        assert sum("graph.halo.bits = auto" in one for one in plan.why) == 1
        return plan, {halo_parallel.BITS[one.codec] for one in plan.exchanges if one.traffic == "halo"}

    shares = [one.share[1] - one.share[0] for one in bits(1, 1.0)[0].ranks]
    sent = {one: halos.step_bytes(shares, 4, every(halos, one)) for one in (32, 8, 2, 1)}
    seconds = {one: float(max(size.sum(0).max(), size.sum(1).max())) / (1e6 / 8) for one, size in sent.items()}
    assert bits(1, 5 * seconds[32])[1] == {32}
    assert bits(1, 4.1 * seconds[8])[1] == {8}
    assert bits(1, 1e-6)[1] == {1}
    assert min(bits(1, 1.1 * seconds[8], synchronize=0)[1]) == 8
    plan, between = bits(1, 4 * (seconds[2] + seconds[8]) / 2)
    assert len(between) > 1
    assert plan.predicted.terms["halo"] <= (seconds[2] + seconds[8]) / 2 * 1.001
    plan, mixed = bits(1, 1.1 * seconds[2], nodes=(0, 1, 1), synchronize=0)
    assert 8 in mixed
    found = [halo_parallel.crossings(halos.options, plan, [0, 1, 2], rank) for rank in range(3)]
    assert found[1].ages in (None, [1, 0, 0])
    assert found[0].options.bits == min(mixed) < 8
    by_peer = {key: np.array([one.bits(key)[0] for one in found]) for key in halos.counts(shares)}
    arriving = {key: np.array([one.bits(key)[1] for one in found]).T for key in halos.counts(shares)}
    for key, one in by_peer.items():
        np.testing.assert_array_equal(one, arriving[key])
        assert one[1, 2] == one[2, 1] == 8
        assert one[0, 1] == one[0, 2] <= 8
    assert plan.predicted.sent_bytes["halo"] == halos.step_bytes(shares, 4, by_peer).sum(1).max()
    assert plans.loads(plans.dumps(plan)) == plan


def test_rows_inside_a_machine_are_fresh_where_those_between_machines_are_late():
    halos = asked({"bits": 1, "synchronize": 4, "late": True}, 3).profile.facts["halo_exchange"]
    here = decide.decide(asked({}, 3), machines(1, 0)).taken
    ranks = tuple(msgspec.structs.replace(one, node=at) for at, one in zip((0, 1, 1), here.ranks, strict=True))

    def planned(computing):
        predicted = msgspec.structs.replace(here.predicted, terms={"forward": computing}, step_seconds=computing)
        plan = msgspec.structs.replace(here, ranks=ranks, why=(), predicted=predicted)
        return halo_exchange.with_halos(plan, halos, machines(2, 1))

    sent = halos.step_bytes([one.share[1] - one.share[0] for one in ranks], 4)
    plan = planned(2 * float(sent[0].sum()) / (1e6 / 8))
    assert any("of ranks of the same machine are fresh in every step" in one for one in plan.why)
    assert plans.loads(plans.dumps(plan)) == plan
    assert halo_parallel.crossings(halos.options, plan, [0, 1, 2], 1).ages == [1, 0, 0]
    assert halo_parallel.crossings(halos.options, plan, [0, 1, 2], 0).ages == [1, 1, 1]
    assert halo_parallel.crossings(halos.options, planned(1e-9), [0, 1, 2], 1).ages is None
    recipe = recipe_of({"depth": 3}, {"halo": {"synchronize": 4, "late": True}}, precision="fp32")
    late = train(recipe, made(), (20, 60), choices=plan.choices, nodes=(0, 2, 3))["losses"]
    mixed = train(recipe, made(), (20, 60), choices=plan.choices, nodes=(0, 1, 1))["losses"]
    assert late[0] == mixed[0]
    assert late[1:] != mixed[1:]


def test_rows_over_fast_links_are_fresh_and_over_slow_ones_as_old_as_their_latency_asks():
    """Machines 0 and 1 have a fast link to one another, the third has a slow one."""
    node = '[[nodes]]\ndevice = "cpu"\ncores = 1\nmemory = "8GiB"\n'
    fast, slow = (1.25e9, 2e-5), (1.25e7, 0.3)  # bytes/s, seconds
    pairs = [[0, 1, *fast], [0, 2, *slow], [1, 2, *slow]]
    known = clusters_.loads(f"pairs = {pairs}\n" + 3 * node)
    here = decide.decide(asked({}, 3), machines(1, 0)).taken
    ranks = tuple(msgspec.structs.replace(one, node=at) for at, one in enumerate(here.ranks))
    predicted = msgspec.structs.replace(here.predicted, terms={"forward": 1.0}, step_seconds=1.0)
    plan = msgspec.structs.replace(here, ranks=ranks, why=(), predicted=predicted)
    took = {}
    for staleness in (1, 2, 9):
        halos = asked({"bits": 1, "synchronize": 0, "late": True, "staleness": staleness}, 3).profile.facts[
            "halo_exchange"
        ]
        found = halo_exchange.with_halos(plan, halos, known)
        oldest = min(staleness, 2)  # four exchanges of 300 ms each take over one step and under two
        ages = found.state(HaloExchangeState).halo_ages
        assert [(one.nodes, one.steps) for one in ages] == [
            ((0, 1), 0),
            ((0, 2), oldest),
            ((1, 2), oldest),
        ]
        assert halo_parallel.crossings(halos.options, found, [0, 1, 2], 1).ages == [0, 1, oldest]
        said = "\n".join(found.why)
        assert "between machines 0-1 are fresh in every step" in said
        assert ("between machines 0-2, 1-2 are up to 2 steps old" in said) == (oldest == 2)
        assert plans.loads(plans.dumps(found)) == found
        took[staleness] = found.predicted.step_seconds
    assert took[9] == took[2] < took[1] - 0.1


def test_bits_of_a_plan_are_those_that_cross():
    recipe = recipe_of({"depth": 3}, {"halo": {"bits": "auto"}}, precision="fp32")
    workload = GraphWorkload(recipe, made())
    plan, halos = plan_of(recipe, workload, (20, 60)), workload.halos()
    shares = [one.share[1] - one.share[0] for one in plan.ranks]
    crossing = plans.Exchange(traffic="halo", level="inside", codec="int2")
    sent = train(recipe, made(), (20, 60), exchanges=(crossing,))["halo"][1:]
    assert sent == [halos.step_bytes(shares, 4, every(halos, 2))[0].sum()] * (STEPS - 1)
    rows = {key: plans.HaloRows(layer=key[0], backward=key[1]) for key in halos.counts(shares)}
    one, other = plans.HaloRows(layer=1, backward=True, nodes=((0, 1),)), (1, True)
    bits = {key: "exact" if key == (2, False) else "int4" for key in rows}
    told = [msgspec.structs.replace(crossing, level="all", codec=bits[key], rows=rows[key]) for key in rows]
    told.insert(0, msgspec.structs.replace(crossing, level="all", codec="int1", rows=one))
    sent = train(recipe, made(), (20, 60), exchanges=tuple(told), nodes=(0, 1, 1))["halo"][1:]
    by_peer = every(halos, 4)
    by_peer[2, False] = np.full((3, 3), 32)
    by_peer[other] = np.array([[4, 1, 1], [4, 4, 4], [4, 4, 4]])
    assert sent == [halos.step_bytes(shares, 4, by_peer)[0].sum()] * (STEPS - 1)


def test_one_rank_is_planned_where_it_is_faster():
    plan = decide.decide(asked({}, None), machines(3, 1)).taken
    assert len(plan.ranks) == 1
    assert any("one rank has the whole graph" in one for one in plan.why)
    assert not any(one.startswith("Measured steps") for one in plan.why)


def test_trials_decide_between_one_rank_and_several():
    def fast(count):
        return lambda every: {trials.key(one): 1.0 if len(one.ranks) == count else 2.0 for one in every}

    cluster, free = machines(3, 1), asked({}, None)
    several = best_layout(Ask(asked({}, 3), cluster))
    for count in (1, 3):
        plan = choice.CHOICE.finish(several, Ask(free, cluster, trials=fast(count)))
        assert len(plan.ranks) == count
        assert any(one.startswith("Measured steps") for one in plan.why)


def test_drawn_batches_are_weighed_against_halos():
    request = asked({}, 3)
    sampled = request.profile.facts["halo_exchange"].sampled()
    recipe = msgspec.structs.replace(sampled.recipe, plan=config.Planning(pin=config.Pin(ranks=3)))
    other = decide.decide(request_from_recipe.of_recipe(recipe, lambda: sampled), machines(1, 0)).taken
    steps = -(-sampled.task.items // sampled.global_batch)
    (said,) = (one for one in decide.decide(request, machines(1, 0)).taken.why if "drawn batches" in one)
    assert "graph.fanout=[10, 10, 10] train.batch_tokens=300" in said
    assert f"{steps} step in {config.units.show_seconds(steps * other.predicted.step_seconds)} on 3 ranks" in said


def test_bits_by_degree_are_a_rule_of_the_plan_and_what_it_says_is_sent():
    options = {"bits": 2, "by_degree": True, "adapt": True}
    halos, here, _ = over_machines(options)
    assert next((one.name, one.start, one.low, one.high, one.signal) for one in here.rules) == (
        "graph.halo.by_degree", 2, 2, 8, "in-degree"
    )  # fmt: skip
    assert {one.name for one in here.rules} >= {"graph.halo.bits", "graph.halo.late"}
    said = "\n".join(here.why)
    assert "rows have 2, 4 and 8 bits by the in-degree of their node, a third of the rows for a peer each" in said
    assert "(2, 4 and 8 bits a value by degree)" in said
    assert plans.loads(plans.dumps(here)) == here
    shares = [one.share[1] - one.share[0] for one in here.ranks]
    even = dataclasses.replace(halos, options=HaloOptions(bits=2)).step_bytes(shares, 4).sum()
    most = dataclasses.replace(halos, options=HaloOptions(bits=8)).step_bytes(shares, 4).sum()
    assert even < halos.step_bytes(shares, 4).sum() < most
    recipe = recipe_of({"depth": 3}, {"halo": {"bits": 2, "by_degree": True}}, precision="fp32")
    workload = GraphWorkload(recipe, made())
    plan = plan_of(recipe, workload, (20, 60))
    cut = workload.halos()
    sent = train(recipe, made(), (20, 60))["halo"][1:]
    planned = cut.step_bytes([one.share[1] - one.share[0] for one in plan.ranks], 4)[0].sum()
    assert sent == [planned] * (STEPS - 1)


@pytest.mark.extremes
@pytest.mark.parametrize("by_degree", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_adapts_follows_from_the_losses_in_the_log_also_after_a_stop(tmp_path, by_degree, monkeypatch):
    monkeypatch.setattr("espalier.sparse.partition.installed", lambda: False)  # over METIS's parts no bit changes
    halo = {"bits": 1, "synchronize": 4, "late": True, "adapt": True, "by_degree": by_degree}
    recipe = recipe_of({"kind": "gcn"}, {"halo": halo}, precision="fp32", steps=60)
    whole = train(recipe, made(), (50,), tmp_path / "whole")
    policy = Adaptive(1, 4)
    expected = []
    for step, loss in enumerate(whole["losses"]):
        choice = policy.next(step)
        expected.append({"bits": choice.bits, "late": float(not choice.synchronous)})
        policy.heard([loss]).turned({})
    assert whole["adapted"][1:] == expected[1:]  # the first step is never late
    assert len({one["bits"] for one in expected}) > 1
    first = train(recipe, made(), (50,), tmp_path / "stopped", stop=30)
    then = train(recipe, made(), (50,), tmp_path / "stopped")
    policy = Adaptive(1, 4)
    for loss in first["losses"]:
        policy.heard([loss]).turned({})
    assert then["adapted"][0]["bits"] == policy.bits


def test_parts_follow_the_shares_of_unequal_devices():
    graph = made(nodes=400, edges=1600)
    sizes = np.bincount(graph_cutting.Cutting(graph, Style(True, "symmetric")).parts([1, 2, 5]), minlength=3)
    np.testing.assert_allclose(sizes, [50, 100, 250], rtol=0.07, atol=1)
    with pytest.raises(UserError, match="shares"):
        clusters(graph.indptr, graph.indices, 3, [1, 2])


def test_a_damaged_part_in_the_cache_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph = made()
    cutting = graph_cutting.Cutting(graph, Style(True, "symmetric"))

    def opened(channel):
        part = graph_cutting.open_part(cutting, [1, 1], channel, writes=channel.rank() == 0)
        return part.halo.owned

    first = ranks(2, opened)
    folder = cutting.folder([1, 1])
    path = folder / "part-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    assert partition_folder.intact(folder, 1, graph.fingerprint()) is None
    assert all(map(torch.equal, first, ranks(2, opened)))
    assert partition_folder.intact(folder, 1, graph.fingerprint()) is not None


def test_fewer_clusters_than_ranks_leave_ranks_without_nodes_and_train_as_one(tmp_path, monkeypatch):
    """As METIS finds them in small graphs, such as eight pairs of nodes in seven parts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(graph_cutting, "clusters_of", lambda *graph, begin: 2 * (np.arange(60, dtype=np.int32) % 2))
    close(train(recipe_of(graph={"halo": HALO}), made(), (25, 50, 75)), train(recipe_of(), made()), rel=1e-9)


def test_more_ranks_than_nodes_are_refused():
    with pytest.raises(UserError, match=r"plan.pin.ranks = 500 is more than the \d+ training nodes of the graph"):
        decide.decide(asked({}, 500), machines(1, 0))
    with pytest.raises(UserError, match="60 nodes for 61 ranks"):
        graph_cutting.Cutting(made(), Style(True, "symmetric")).parts([1] * 61)
