"""One model, eight clusters: the plan an expert expects, each for the stated reason."""

from __future__ import annotations

from typing import Any

import pytest

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan import build_plan, search
from espalier.plan.base import Plan
from espalier.plan.request import Request
from espalier.plan.search import TIE
from espalier.recipe import Pin, defaults, recipe_file
from espalier.train import request_from_recipe


def asked(shape: str = "llama-7b", sequence: int = 4096, samples: int = 1024, **model: Any) -> Request:
    table = {
        "model": {"shape": shape, "context": sequence, **model},
        "data": {"path": "python:stdlib"},
        "train": {"steps": 10, "sequence": sequence, "batch_tokens": samples * sequence, "precision": "bf16"},
    }
    table["train"]["optimizer"] = {"kind": "adamw"}
    return request_from_recipe.of_recipe(defaults.resolve(recipe_file.from_table(table))[0])


def machines(*tables: tuple[str, int, int], between: str = "800Gbit/s") -> Cluster:
    nodes = "".join(f'[[nodes]]\ndevice = "{name}"\ncount = {n}\ndevices = {each}\n' for name, n, each in tables)
    return clusters.loads(f'{nodes}[links]\nbetween = "{between}"')


def planned(request: Request, cluster: Cluster) -> Plan:
    found = search.search(request, cluster)
    best = found.best()
    assert best is not None
    return build_plan.make(request, found, best)


def said(plan: Plan, *words: str) -> bool:
    """One sentence holds all these words."""
    return any(all(word in sentence for word in words) for sentence in plan.why)


def seconds(plan: Plan, *terms: str) -> float:
    assert plan.predicted is not None
    return sum(plan.predicted.terms[term] for term in terms)


def test_one_device_has_nothing_to_divide() -> None:
    plan = planned(asked("gpt2-124m", 1024, 512), machines(("A100-80GB", 1, 1)))
    layout = plan.layout
    assert (layout.dp, layout.tp, layout.sp, layout.pp) == (1, 1, 1, 1)
    assert layout.recompute == "none"
    assert seconds(plan, "all_reduce", "refresh", "tensor", "sequence", "send") == 0
    assert plan.executable


def test_one_node_shards_the_optimizer_only_and_cuts_nothing() -> None:
    plan = planned(asked(), machines(("A100-80GB", 1, 8)))
    layout = plan.layout
    assert (layout.dp, layout.tp, layout.sp, layout.pp) == (8, 1, 1, 1)
    assert layout.shard == {"params": 1, "grads": 1, "optimizer": 8}
    assert said(plan, "States sharded", "replicated they do not fit")
    assert plan.executable, "train runs every nest of shards"


def test_a_slow_network_is_crossed_once_a_step_behind_a_long_backward() -> None:
    """Where layers are not cut: messages of a pipeline are fewer."""
    request = asked().changed(pin=Pin(pp=1))
    fast, slow = (planned(request, machines(("A100-80GB", 4, 8), between=b)) for b in ("800Gbit/s", "10Gbit/s"))
    layout = slow.layout
    assert max(layout.shard["params"], layout.shard["grads"], layout.tp * layout.sp) <= 8  # inside a machine
    assert layout.accumulate < fast.layout.accumulate  # the last backward is long enough to hide most of the exchange
    assert seconds(slow, "all_reduce", "refresh") < 0.4 * seconds(slow, "forward", "backward")
    assert said(slow, "States sharded")


def test_a_network_that_is_too_slow_is_not_crossed() -> None:
    plan = planned(asked(), machines(("A100-80GB", 4, 8), between="100Mbit/s"))
    assert {rank.node for rank in plan.ranks} == {0}
    assert len(plan.ranks) == 8
    assert said(plan, "24 of 32 devices are left out", "slower")


def test_tiny_memory_recomputes_and_shards_everything_where_the_model_is_not_cut() -> None:
    """Where it may be cut, the plan is at least as fast and divides the parameters one way or the other."""
    request, there = asked().changed(precision="fp16"), machines(("T4", 8, 8), between="100Gbit/s")
    plan, free = (planned(request.changed(pin=pin), there) for pin in (Pin(tp=1, sp=1, pp=1), Pin()))
    assert plan.predicted is not None
    assert free.predicted is not None
    assert free.predicted.step_seconds <= plan.predicted.step_seconds * (1 + TIE)
    assert free.layout.shard["params"] > 1 or free.layout.pp * free.layout.tp > 1
    assert plan.layout.recompute != "none"
    assert plan.layout.shard["params"] > 1
    assert plan.layout.shard["optimizer"] > 1
    assert said(plan, "Activations are recomputed")
    assert said(plan, "replicated they do not fit")


def test_mixed_devices_share_by_speed() -> None:
    plan = planned(asked("gpt2-124m", 1024, 512), machines(("A100-80GB", 1, 4), ("H100", 1, 4)))
    shares = {node: {r.share[1] - r.share[0] for r in plan.ranks if r.node == node} for node in (0, 1)}
    assert min(shares[1]) > 1.5 * max(shares[0])
    assert plan.ranks[-1].share[1] == 512
    assert said(plan, "differ in speed", "by their speed")


def test_thousands_of_devices_keep_optimizer_states_in_a_few_machines() -> None:
    plan = planned(asked(samples=4096), machines(("A100-80GB", 512, 8)))
    layout = plan.layout
    assert layout.dp * layout.tp * layout.sp * layout.pp == 4096
    assert 8 <= layout.shard["optimizer"] <= 256  # not over all: a gather of many short pieces is all latency
    assert layout.pp == 1
    assert said(plan, "States sharded")


def test_a_long_sequence_is_cut() -> None:
    short = planned(asked(), machines(("A100-80GB", 4, 8)))
    long = planned(asked(sequence=131072, samples=32), machines(("A100-80GB", 4, 8)))
    assert short.layout.tp * short.layout.sp == 1
    assert long.layout.tp * long.layout.sp >= 4
    assert long.layout.tp * long.layout.heads <= 8  # inside a machine; rings may leave it
    assert said(long, "cut over", "without")


def test_without_a_fast_link_only_gradients_travel_and_large_micro_steps_hide_them() -> None:
    """Where layers are not cut. Where they may be, the plan is at least as fast, and cuts nothing else."""
    cluster = machines(("RTX 3090", 8, 1), between="1Gbit/s")
    request = asked("gpt2-124m", 1024, 512)
    pins = Pin(pp=1, loss_chunk=0), Pin(loss_chunk=0)  # all logits at once
    plan, free = (planned(request.changed(pin=pin), cluster) for pin in pins)
    layout = plan.layout
    assert (layout.tp, layout.sp, layout.pp) == (1, 1, 1)
    assert (free.layout.tp, free.layout.sp) == (1, 1)
    assert sum(free.predicted.terms.values()) <= sum(plan.predicted.terms.values()) * (1 + TIE)
    assert layout.shard["params"] == layout.shard["grads"] == 1  # nothing is exchanged in every micro-batch
    assert seconds(plan, "all_reduce", "refresh") > seconds(plan, "forward", "backward")


@pytest.mark.extremes
@pytest.mark.parametrize(
    "shape",
    ["llama-7b", *(pytest.param(one, marks=pytest.mark.slow) for one in ("llama-13b", "llama-70b")), "gpt3-175b"],
)
@pytest.mark.parametrize("count", [1, pytest.param(8, marks=pytest.mark.slow), 128])
def test_large_models_get_a_plan_or_are_told_why_not(shape: str, count: int) -> None:
    request, cluster = asked(shape, 2048, 1536), machines(("A100-80GB", count, 8))
    found = search.search(request, cluster)
    best = found.best()
    if best is None:
        assert count == 1
        assert shape in ("llama-70b", "gpt3-175b")
        return
    plan = build_plan.make(request, found, best)
    assert plan.predicted is not None
    assert 0.35 < plan.predicted.mfu < 0.70
    assert plan.predicted.memory_bytes["peak"] <= plan.predicted.memory_limit
    assert plan.layout.tp <= 8  # tensor ranks stay inside a machine
    assert plan.why
    assert plan.runners_up
