"""The precision of a plan: no allowed one is faster by the planner's own estimate, and its text is what it counted."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import msgspec
import pytest
import torch
from asked import decoder, gpus, processor

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster, Rate
from espalier.plan import base as plans
from espalier.plan import device_model, precision, trials
from espalier.plan.ask import PlanDecision
from espalier.plan.base import Plan
from espalier.plan.decide import decide
from espalier.plan.request import AUTO, Request
from espalier.recipe import Auto, Pin, defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train import build, request_from_recipe, table

LARGE = {"width": 2048, "layers": 8, "sequence": 1024, "batch": 256, "heads": 16, "kv_heads": 16}


def mixed(*tables: tuple[str, int, int], between: str = "100Gbit/s") -> Cluster:
    """Of (device, machines, devices of each)."""
    nodes = "".join(f'[[nodes]]\ndevice = "{name}"\ncount = {n}\ndevices = {each}\n' for name, n, each in tables)
    return clusters.loads(f'{nodes}[links]\nbetween = "{between}"\n')


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


def derived(request: Request, cluster: Cluster) -> PlanDecision:
    return decide(request.changed(precision=AUTO), cluster)


# --- which precisions there are ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "known"),
    [
        ("A100-80GB", ("bf16", "tf32")),
        ("H100", ("bf16", "tf32")),
        ("RTX 4090", ("bf16", "fp32")),
        ("V100-32GB", ("fp16", "fp32")),
        ("T4", ("fp16", "fp32")),
    ],
)
def test_a_device_computes_fast_what_its_rates_say(device: str, known: tuple[str, ...]) -> None:
    assert precision.fast(clusters.device(device)) == known
    assert derived(decoder(**LARGE), gpus(device)).plan.precision == known[0]


def test_slow_bf16_beside_fast_fp16_does_not_count() -> None:
    slow = msgspec.structs.replace(clusters.device("V100-32GB"), flops={"fp32": 15.7e12, "bf16": 16e12, "fp16": 125e12})
    assert precision.fast(slow) == ("fp16", "fp32")
    middling = msgspec.structs.replace(slow, flops={"fp32": 15.7e12, "bf16": 40e12, "fp16": 125e12})
    assert precision.fast(middling) == ("bf16", "fp16", "fp32")


def multiplying_bf16(times: float) -> Cluster:
    """A processor whose products in bf16 are so many times as fast as in fp32."""
    (node,) = processor(4).nodes
    flops = {"fp32": 40e9, "bf16": 40e9 * times}
    rates = tuple(Rate("product", one, 512, 512, 512, 1, 1, flops[one]) for one in flops)
    device = msgspec.structs.replace(node.device, flops=flops, rates=rates, peak=False)
    return Cluster(nodes=(msgspec.structs.replace(node, device=device),))


@pytest.mark.parametrize("times", [0.4, 4.0])
def test_processors_train_in_fp32_and_may_be_told_to_train_in_bf16(times: float) -> None:
    cluster = multiplying_bf16(times)
    plan, plain, low = (decide(decoder(precision=name), cluster).plan for name in (AUTO, "fp32", "bf16"))
    assert msgspec.structs.replace(plan, why=()) == msgspec.structs.replace(plain, why=())
    assert precision.ON_PROCESSORS in plan.why
    assert low.precision == "bf16"
    assert (seconds(low) < seconds(plan)) == (times > 1)


@pytest.mark.parametrize(
    ("times", "measured", "taken"), [(4.0, 0.5, "bf16"), (4.0, 0.9, "fp32"), (4.0, 1.1, "fp32"), (0.4, 0.5, "fp32")]
)
def test_processors_train_in_bf16_where_steps_in_it_were_measured_and_are_faster(
    times: float, measured: float, taken: str
) -> None:
    """Products that multiply fast are worth a trial, and only a trial decides."""
    asked: list[trials.Key] = []

    def measure(plans: Sequence[Plan]) -> dict[trials.Key, float]:
        asked.extend(map(trials.key, plans))
        return {one: measured if one.precision == "bf16" else 1.0 for one in map(trials.key, plans)}

    plan = decide(decoder(precision=AUTO), multiplying_bf16(times), trials=measure).taken
    assert plan.precision == taken
    assert any(one.precision == "bf16" for one in asked) == (times > 1)
    if taken == "bf16":
        assert seconds(plan) == pytest.approx(measured)
        assert any("bf16, micro-batch" in one and "0.5" in one.replace("500 ms", "0.5") for one in plan.why)


# --- the law -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *(pytest.param(one, marks=pytest.mark.slow) for one in (0, *range(2, 24)))])
def test_no_allowed_precision_is_faster_by_the_planners_own_estimate(seed: int) -> None:
    draw = random.Random(seed)
    kinds = draw.sample(["A100-40GB", "H100", "RTX 3090", "V100-16GB", "T4"], draw.choice([1, 1, 2, 3]))
    cluster = mixed(*((kind, draw.choice([1, 2]), draw.choice([1, 2, 4])) for kind in kinds),
                    between=f"{draw.choice([1, 10, 400])}Gbit/s")  # fmt: skip
    request = decoder(
        draw.choice([256, 2048, 4096]), draw.choice([2, 8]), draw.choice([128, 1024]), draw.choice([4, 64])
    )
    names = precision.candidates(cluster)
    alone = [decide(request.changed(precision=name), cluster) for name in names]
    found = derived(request, cluster)
    fitting = [one for one in alone if one.fits]
    assert found.fits == bool(fitting)
    if fitting:
        best = min(fitting, key=lambda one: seconds(one.plan))
        assert seconds(found.plan) == seconds(best.plan)
        assert found.plan.precision == best.plan.precision  # the first of equals
        assert found.plan.layout == best.plan.layout


def test_memory_decides_where_a_faster_precision_does_not_fit() -> None:
    """Of one layout on one rank the precision that holds less is taken where only that fits."""
    request = decoder(**LARGE, pin=Pin(ranks=1, micro_batch=1, recompute="none"))
    cluster = gpus(devices=1)
    peaks = {}
    for name in ("bf16", "tf32"):
        plan = decide(request.changed(precision=name), cluster).plan
        assert plan.predicted is not None
        peaks[name] = plan.predicted.memory_bytes["peak"]
    between = request.changed(memory=(peaks["bf16"] + peaks["tf32"]) / 2)
    assert derived(request, cluster).plan.precision == "bf16"
    assert derived(between, cluster).plan.precision == min(peaks, key=lambda name: peaks[name])
    nothing = derived(request.changed(memory=min(peaks.values()) / 4), cluster)
    assert not nothing.fits
    assert nothing.request.precision != AUTO


# --- mixed clusters ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_t4_does_not_slow_sixteen_a100s() -> None:
    request = decoder(**LARGE)
    alone, beside = mixed(("A100-80GB", 2, 8)), mixed(("A100-80GB", 2, 8), ("T4", 1, 1))
    plan = derived(request, beside).plan
    assert plan.precision == "bf16"
    assert len(plan.ranks) == 16
    assert seconds(plan) == seconds(derived(request, alone).plan)
    assert {beside.devices()[rank].table.device.name for rank in range(len(plan.ranks))} == {"A100-80GB"}
    (told,) = (sentence for sentence in plan.why if "T4" in sentence)
    found = re.fullmatch(
        r"1 x T4 is left out: no bf16 there; with all, in (\w+), a step takes .*, (.*) times as long\.", told
    )
    assert found is not None
    all_of_them = decide(request.changed(precision=found[1], pin=Pin(ranks=17)), beside).plan
    assert float(found[2]) == pytest.approx(seconds(all_of_them) / seconds(plan), rel=0.04)
    assert float(found[2]) > 1.2


def test_a_slow_card_first_in_the_file_is_left_out_too() -> None:
    request = decoder(**LARGE)
    plan = derived(request, mixed(("T4", 1, 1), ("A100-80GB", 1, 8))).plan
    assert plan.precision == "bf16"
    assert {rank.node for rank in plan.ranks} == {1}


@pytest.mark.slow
def test_machines_of_one_precision_agree_by_rounds_without_the_card_that_lacks_it() -> None:
    far = {"between": "100Mbit/s"}
    request = decoder(**{**LARGE, "batch": 4096}, sync=Auto())
    alone, beside = mixed(("A100-80GB", 2, 8), **far), mixed(("A100-80GB", 2, 8), ("T4", 1, 1), **far)
    plan, whole = derived(request, beside).plan, derived(request, alone).plan
    assert plan.replicas
    assert plan.precision == "bf16"
    assert (plan.choices, plan.ranks) == (whole.choices, whole.ranks)


def test_cards_that_share_fast_fp16_train_together_in_it() -> None:
    plan = derived(decoder(**LARGE), mixed(("V100-32GB", 1, 8), ("T4", 1, 8))).plan
    assert plan.precision == "fp16"


def test_a_precision_that_was_set_leaves_out_who_lacks_it() -> None:
    cluster = mixed(("A100-80GB", 1, 8), ("T4", 1, 1))
    plan = decide(decoder(**LARGE, precision="bf16"), cluster).plan
    assert len(plan.ranks) == 8
    with pytest.raises(UserError, match=r"T4 has no rate for bf16[\s\S]*precisions are fp16, fp32[\s\S]*\"fp16\""):
        decide(decoder(**LARGE, precision="bf16"), gpus("T4"))


# --- what is said --------------------------------------------------------------------------------------------------


def test_six_lines_of_llama_7b_on_eight_a100s_are_planned_in_bf16(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """And say why; fp32 that is set stays, beside how much faster bf16 would be."""
    words = {"model": {"shape": "llama-7b"}, "data": {"path": str(tmp_path)}, "train": {"batch_tokens": 2**22}}

    def planned(**train: str) -> Plan:
        table = {**words, "train": {**words["train"], **train}}
        recipe, _ = defaults.resolve(recipe_file.from_table(table), vocabulary=32_000)
        return decide(request_from_recipe.of_recipe(recipe), gpus()).taken

    fast, exact = planned(), planned(precision="fp32")
    assert fast.precision == "bf16"
    assert "bf16: 16x fp32's rate and 2x TF32's on A100-80GB." in fast.why
    assert exact.precision == "fp32"
    (told,) = (sentence for sentence in exact.why if sentence.startswith("In bf16"))
    times = re.fullmatch(r"In bf16 this layout would be (.*) times as fast as in fp32\.", told)
    assert times is not None
    assert 8 < float(times[1]) < 17
    assert seconds(exact) > 8 * seconds(fast)


def test_what_was_set_is_not_called_slow_where_nothing_is_faster() -> None:
    for name, device in (("bf16", "A100-80GB"), ("fp16", "A100-80GB"), ("fp16", "T4")):
        assert not any(
            "times as fast as in" in one for one in decide(decoder(**LARGE, precision=name), gpus(device)).plan.why
        )


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_fp8_is_not_there_and_bf16_is_its_alternative(name: str) -> None:
    with pytest.raises(UserError, match=f"H100 has no rate for {name}") as caught:
        decide(decoder(**LARGE, precision=name), gpus("H100"))
    assert "is not there yet" in caught.value.why
    assert 'train.precision = "bf16"' in caught.value.do
    assert "fp64" not in caught.value.do


@pytest.mark.parametrize(
    ("device", "asked", "says"), [("T4", "tf32", "fp16"), ("T4", "fp64", "fp32"), ("A100-80GB", "fp7", "bf16")]
)
def test_a_rate_that_is_missing_is_told_with_one_that_is_there(device: str, asked: str, says: str) -> None:
    with pytest.raises(UserError, match=f"{device} has no rate for {asked}") as caught:
        device_model.peak(clusters.device(device), asked)
    assert f'train.precision = "{says}"' in caught.value.do


# --- TF32 ----------------------------------------------------------------------------------------------------------


def test_tf32_is_switched_on_by_its_plans_only(tmp_path) -> None:  # type: ignore[no-untyped-def]
    words = {"model": {"depth": 1}, "data": {"path": str(tmp_path)}}
    recipe = recipe_file.from_table(words)
    before = torch.get_float32_matmul_precision()
    try:
        for name, wanted in (("fp32", before), ("bf16", before), ("tf32", "high")):
            made = table.chosen(recipe, plans.Plan(precision=name))
            switches = [one for one in made if isinstance(one, build.Tf32)]
            assert len(switches) == (name == "tf32")
            for one in switches:
                one.wrap(None)  # type: ignore[arg-type]
            assert torch.get_float32_matmul_precision() == wanted
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_faster_precision_in_which_nothing_fits_is_named_with_what_would_make_it_fit() -> None:
    table = {"model": {"kind": "gpt", "shape": "llama3-1b"}, "data": {"path": "python:stdlib"}}
    recipe = defaults.resolve(recipe_file.from_table(table))[0]
    plan = decide(request_from_recipe.of_recipe(recipe), gpus("RTX 4090", devices=1)).plan
    assert plan.precision == "fp32"
    sentence = next(sentence for sentence in plan.why if sentence.startswith("fp32: "))
    assert re.search(r"no layout in bf16 fits: .* are missing. Cheapest change: plan.pin.offload=\"host\"", sentence)
    assert not any("nothing narrower" in sentence for sentence in plan.why)
