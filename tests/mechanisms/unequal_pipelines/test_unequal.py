"""Unequal pipelines as plans of recipes: what is chosen, what is held, what is said."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from espalier.cli import plan_page
from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.mechanisms.unequal_pipelines import unequal_plan as unequal
from espalier.mechanisms.unequal_pipelines.cost import EngineCosts
from espalier.mechanisms.unequal_pipelines.pipeline_search import pipeline_of, stage_rates
from espalier.mechanisms.unequal_pipelines.pipeline_solver import Group, Slot
from espalier.plan import base as plans
from espalier.plan.calibration import DATASHEET
from espalier.plan.compose import Refusal
from espalier.plan.decide import decide
from espalier.plan.request import Request
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import request_from_recipe

ROOT = Path(__file__).parents[3]


def asked(pipelines: str | None = "unequal", **model: int) -> Request:
    table = {
        "model": {"depth": 8, "width": 96, "heads": 2} | model,
        "data": {"path": "python:stdlib"},
        "train": {"sequence": 128, "batch_tokens": 2048, "precision": "fp32", "optimizer": {"kind": "adamw"}},
        "plan": {"pin": {} if pipelines is None else {"pipelines": pipelines}},
    }
    return request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0])


def processors(*cores: tuple[float, int], bandwidth: str = "1Gbit/s") -> Cluster:
    """(FLOP/s, bytes of memory) of each processor, all in one machine."""
    tables = [
        f'[[nodes]]\nname = "here"\ncores = 1\nmemory = {memory}\n'
        f'inside = {{ bandwidth = "{bandwidth}", latency = "100us", launch = "100us" }}\n'
        f'[nodes.device]\nname = "core {number}"\nkind = "cpu"\nmemory = {memory}\nmemory_bandwidth = 1e10\n'
        f"flops = {{ fp32 = {flops} }}\npeak = false\n"
        for number, (flops, memory) in enumerate(cores)
    ]
    return clusters.loads("\n".join(tables))


GIB = 2**30


def test_slow_devices_get_fewer_layers_or_samples() -> None:
    plan = decide(asked(), processors((4e10, GIB), (1e10, GIB)), DATASHEET).taken
    plans.check(plan, 16)
    work = [0.0, 0.0]
    for stage in plan.stages:
        start, stop = plan.ranks[stage.ranks[0]].share
        work[stage.ranks[0]] += (stop - start) * (stage.layers[1] - stage.layers[0])
    assert work[0] > 2 * work[1]
    assert plan.planner == "flashflex"
    assert plan.predicted is not None
    assert sum(plan.predicted.terms.values()) == pytest.approx(plan.predicted.step_seconds)
    assert any("Devices differ" in why for why in plan.why)


def test_unequal_pipelines_are_as_uncertain_as_their_devices() -> None:
    plan = decide(asked(), processors((4e10, GIB), (1e10, GIB)), DATASHEET).taken
    assert plan.predicted is not None
    assert plan.predicted.spread == DATASHEET.spread
    assert "give or take 25%" in plan_page.render(plan, [], "two", plan_page.PlanQuestion(10))


def test_where_faster_unequal_pipelines_cannot_run_the_plan_says_why() -> None:
    request = asked()
    allowed = request.refuses
    assert allowed is not None

    def refuses(plan: plans.Plan) -> Refusal | None:
        differ = Refusal("its stages differ", ("pipeline", "muon"), "another optimizer")
        return differ if plan.planner == "flashflex" else allowed(plan)

    request = replace(request, refuses=refuses)
    plan = decide(request, processors((4e10, GIB), (1e10, GIB)), DATASHEET).taken
    assert plan.planner == "search"
    (sentence,) = [why for why in plan.why if "Unequal pipelines" in why]
    assert "a step, but are not possible: its stages differ; another optimizer." in sentence


def test_what_does_not_help_is_left_out_and_it_is_said() -> None:
    slow = processors((4e10, GIB), (4e10, GIB), (1e8, GIB))
    plan = decide(asked(), slow, DATASHEET).taken
    assert len(plan.ranks) == 2
    told = [why for why in plan.why if "core 2 is left out" in why]
    assert told
    assert "with it a step takes" in told[0]
    page = plan_page.render(plan, [], "three", plan_page.PlanQuestion(10))
    assert told[0].split(":")[0] in page


def test_equal_devices_are_planned_as_before() -> None:
    same = processors((4e10, GIB), (4e10, GIB))
    assert decide(asked(None), same, DATASHEET).taken.planner == "search"
    assert unequal.asked(asked("equal"), processors((4e10, GIB), (1e10, GIB)))
    assert decide(asked("equal"), processors((4e10, GIB), (1e10, GIB)), DATASHEET).taken.planner == "search"


def cards(tied: bool = False) -> tuple[Request, Cluster]:
    """LLaMA-7B on cards of three kinds."""
    model = {"depth": 32, "width": 4096, "heads": 32, "feed_forward": 11008, "vocabulary": 32000, "tied": tied}
    train = {"sequence": 4096, "batch_tokens": 24 * 4096, "precision": "bf16", "optimizer": {"kind": "adamw"}}
    pin = {"pipelines": "unequal", "micro_batch": 1}
    table = {"model": model, "data": {"path": "python:stdlib"}, "train": train, "plan": {"pin": pin}}
    there = clusters.loads("""
nodes = [
    { device = "A100-80GB", devices = 3 },
    { device = "RTX 3090", devices = 3 },
    { device = "RTX 4090", devices = 2 },
]
links = { between = "10Gbit/s" }
""")
    return request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0]), there


def test_stages_of_one_pipeline_share_matrices_over_unequal_numbers_of_devices() -> None:
    request, there = cards()
    made = unequal.best(request, there)
    assert made is not None
    plan = plans.check(unequal.plan_of(*made), 24)
    assert {one.tensor for one in plan.stages} == {1, 2}
    alike = [unequal.flashflex.place(costs.classes, costs).seconds for costs in (EngineCosts(request, there, 1),)]
    assert made[1].seconds < min(alike)


def test_pipelines_that_cut_a_layer_differently_sum_whole_gradients_over_all_its_ranks() -> None:
    request, there = cards()
    costs = EngineCosts(request, there, 1, (1, 2), "block")
    search = unequal.flashflex.Search(costs.classes, costs)
    wide, narrow = ([Group(0, 2), Group(1)], [Group(kind) for kind in (0, 1, 1, 2, 2)])
    made = [search.in_order(one, 10.0) for one in (wide, narrow)]
    pipelines = [one for one in made if one is not None]
    assert len(pipelines) == 2
    sent = costs.gradients(pipelines, seconds=False)
    layer = request.layer_parameters * costs._storage
    first = pipelines[0].stages[0].layers  # on two devices of one pipeline, on one of the other
    outside = request.profile.outside / request.profile.tables * costs._storage
    assert sent[0] == pytest.approx(2 * 2 / 3 * (first * layer + outside))
    assert sent[1] == pytest.approx((32 - first) * layer + outside), "alike on one device of each"
    assert costs.sync(pipelines) < float("inf")
    tied, _ = cards(tied=True)
    assert all(len(one) == 1 for one in unequal._degrees(tied, there)), "what two stages share is cut alike in both"


def test_where_equal_pipelines_do_not_fit_the_refusal_says_that_unequal_ones_do() -> None:
    small = processors((4e10, 263 * 2**20), (1e10, 193 * 2**20))
    assert decide(asked(None), small, DATASHEET).taken.planner == "flashflex"
    with pytest.raises(UserError, match="does not fit") as caught:
        decide(asked("equal"), small, DATASHEET).taken  # noqa: B018
    assert caught.value.do.startswith('plan.pin.pipelines="unequal" (')


def unlike(machines: int, depth: int = 16) -> tuple[Request, Cluster]:
    """So many machines of each of two kinds, four devices in each."""
    tables = [f'[[nodes]]\ndevice = "{name}"\ndevices = 4\ncount = {machines}\n' for name in ("H100", "A100-80GB")]
    cluster = clusters.loads("\n".join([*tables, '[links]\nbetween = "400Gbit/s"']))
    request = asked(None, depth=depth, width=2048, heads=16)
    return request.changed(global_batch=1024, precision="bf16"), cluster


@pytest.mark.slow
def test_pipelines_found_on_a_part_are_laid_over_every_device_once() -> None:
    request, cluster = unlike(16)
    assert unequal.equal_parts(request, cluster) == 2
    made = unequal.best(request, cluster)
    assert made is not None
    costs, layout = made
    plan = unequal.plan_of(costs, layout)
    plans.check(plan, 1024)
    seats = [(rank.node, rank.device) for rank in plan.ranks]
    assert len(seats) == len(set(seats)) == 128 - sum(layout.unused.values())
    for stage in plan.stages:
        assert len({plan.ranks[rank].node for rank in stage.ranks}) == 1
    part, alone = unlike(8)
    half = unequal.best(part.changed(global_batch=512), alone)
    assert half is not None
    assert layout.priced == half[1].priced, "no more is searched than a part"
    assert layout.seconds - layout.sync <= 1.001 * (half[1].seconds - half[1].sync)
    said = unequal.reasons(costs, layout)
    assert len(said) < 3 + len(layout.pipelines)


def test_kinds_that_cannot_be_divided_are_not_searched_beyond_a_limit() -> None:
    request, cluster = unlike(9)
    three = cluster.changed(nodes=(cluster.nodes[0], cluster.nodes[1].changed(count=8)))
    assert unequal.equal_parts(request, three) == 1
    assert "no equal parts" in unequal.asked(request, three)
    assert unequal.equal_parts(request.changed(global_batch=1023), unlike(16)[1]) == 1


def test_asked_for_in_vain_is_told() -> None:
    plan = decide(asked("unequal"), processors((4e10, GIB)), DATASHEET).taken
    assert any("Unequal pipelines are not possible here" in why for why in plan.why)


@pytest.mark.parametrize("clusters", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_no_plan_holds_more_than_its_devices_may(clusters: int) -> None:
    """Random clusters, some of which are too small for any plan."""
    draw, made = random.Random(3), 0
    request = asked()
    for _ in range(clusters):
        count = draw.randint(1, 3)
        cores = [(draw.choice([1e9, 1e10, 4e10]), draw.randint(195, 263) * 2**20) for _ in range(count)]
        costs = EngineCosts(request, processors(*cores), draw.choice([1, 2, 4]))
        try:
            layout = unequal.flashflex.place(costs.classes, costs)
        except UserError:  # refused: nothing holds the model
            continue
        made += 1
        for one in layout.pipelines:
            for number, stage in enumerate(one.stages):
                slot = Slot(number, len(one.stages))
                held, limit = costs.held(stage.group, slot, stage.layers)
                assert float(sum(held.values())) <= limit
    assert clusters / 4 < made < clusters


def test_the_example_is_planned_with_unequal_stages() -> None:
    recipe, _ = defaults.resolve(recipe_file.load(ROOT / "examples" / "unequal.toml", []))
    cluster = clusters.read(ROOT / "examples" / "unequal-cluster.toml")
    plan = decide(request_from_recipe.of_recipe(recipe), cluster, DATASHEET).taken
    assert plan.planner == "flashflex"
    layers = [stage.layers[1] - stage.layers[0] for stage in plan.stages]
    assert len(set(layers)) > 1


def test_sums_of_gradients_take_what_they_reach_of_a_measured_link() -> None:
    """Processors that are slower than the link bound sums; hand-overs of stages do not add anything up."""
    cluster = processors((1e10, GIB), (1e10, GIB))
    seconds = []
    for share in (1.0, 0.25):
        link = clusters.Link(bandwidth=1e8, latency=1e-4, measured=True, share=share)
        nodes = tuple(msgspec.structs.replace(one, inside=link) for one in cluster.nodes)
        costs = EngineCosts(asked(), msgspec.structs.replace(cluster, nodes=nodes), 2)
        one = pipeline_of([Group(0)], [8], stage_rates([Group(0)], costs), costs)
        other = pipeline_of([Group(1)], [8], stage_rates([Group(1)], costs), costs)
        seconds.append((costs.gradients([one, other])[0], costs.send(Group(0), Group(1))))
    (fast, send), (slow, same) = seconds
    assert slow == pytest.approx(4 * fast, rel=0.02)
    assert send == same
