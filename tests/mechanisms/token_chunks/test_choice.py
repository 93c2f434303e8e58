"""Chunks of tokens in plans: chosen where logits or inner activations are over a tenth of memory, else as before."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from espalier.cli import resolve_recipe
from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.mechanisms.token_chunks.state import TokenChunksState
from espalier.plan import base as plans
from espalier.plan import collective_time, memory_model, step_time
from espalier.plan.axes import token_chunks
from espalier.plan.base import Plan
from espalier.plan.cost_inputs import CostInputs, limit
from espalier.plan.decide import decide
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train.workload_registry import Resolved


def cards(device: str, devices: int = 8) -> Cluster:
    return clusters.loads(f'[[nodes]]\ndevice = "{device}"\ndevices = {devices}')


@cache
def request_of(sequence: int, shape: str = "llama3-8b", batch: int = 1, kind: str = "gpt", **pin: Any) -> Request:
    model: dict[str, Any] = {"shape": shape, "context": sequence}
    if kind == "moe":
        model = {"kind": "moe", "depth": 2, "width": 256, "heads": 4, "vocabulary": 32000, "experts": 4}
    table = {
        "model": model,
        "data": {"path": "python:stdlib"},
        "train": {"steps": 10, "sequence": sequence, "batch_tokens": batch * sequence, "precision": "bf16"},
        "plan": {"pin": pin},
    }
    return resolve_recipe.request(Resolved(defaults.resolve(recipe_file.from_table(table))[0]))


def planned(request: Request, cluster: Cluster) -> Plan:
    return decide(request, cluster).taken


LONG = [pytest.param(9 << 17, "H200", marks=pytest.mark.slow), (1 << 19, "H100")]


@pytest.mark.parametrize(("sequence", "device"), LONG)
def test_8b_at_very_long_context_has_a_plan_on_eight_cards(sequence: int, device: str) -> None:
    assert planned(request_of(sequence), cards(device)).state(TokenChunksState).loss
    plan = planned(request_of(sequence, tp=1), cards(device))
    state = plan.state(TokenChunksState)
    assert state.loss
    assert state.feed_forward
    assert sum(plan.predicted.memory_bytes.values()) / 2 <= plan.predicted.memory_limit  # with their sum, `peak`
    assert any(sentence.startswith(f"Logits are computed {state.loss:,} tokens at a time") for sentence in plan.why)
    assert f"Loss by {state.loss:,} tokens, feed-forward by {state.feed_forward:,} tokens" in plan.why[0]


@pytest.mark.parametrize(("sequence", "device"), LONG)
@pytest.mark.parametrize(
    "pins", [{"tp": 1, "feed_forward_chunk": 0}, pytest.param({"loss_chunk": 0}, marks=pytest.mark.slow)]
)
def test_8b_at_very_long_context_does_not_fit_without_chunks(sequence: int, device: str, pins: dict[str, int]) -> None:
    with pytest.raises(UserError, match="does not fit"):
        planned(request_of(sequence, **pins), cards(device))


def test_below_a_tenth_a_plan_says_nothing_of_chunks() -> None:
    request = request_of(4096, "llama3-1b", 8)
    plan = planned(request, cards("H200"))
    assert "token_chunks" not in plan.choices
    assert "token_chunks" not in plans.dumps(plan)
    assert plan == planned(request.changed(facts={}), cards("H200"))


def inputs(request: Request, cluster: Cluster, ranks: int = 8, **layout: Any) -> CostInputs:
    on = collective_time.fleet(cluster, ranks)
    return CostInputs(request, on, on.kinds[0], Layouts(**layout))


@pytest.mark.parametrize("samples", [1, 8, 64, 512])
def test_the_rule_is_a_tenth_of_what_a_rank_may_hold(samples: int) -> None:
    request, cluster = request_of(2048, "llama3-1b", 4096), cards("RTX 4090")
    step = inputs(request, cluster, dp=8, recompute="block")
    room = limit(step.on.kinds[0], request)
    whole = step.whole(samples)
    loss, feed_forward = step.chunks(whole)
    assert (loss > 0) == (samples * 2048 * 128256 * 4 > 0.1 * room)
    assert (feed_forward > 0) == (whole.layer.chunks.size > 0.1 * room)
    for chunk, work in ((loss, whole.rest), (feed_forward, whole.layer)):
        if chunk:
            assert chunk == 2 ** round(np.log2(chunk))
            assert chunk * work.chunks.each <= 0.025 * room < 2 * chunk * work.chunks.each


def test_arrays_are_priced_as_single_layouts() -> None:
    request, cluster, sizes = request_of(2048, "llama3-1b", 4096), cards("RTX 4090"), np.array([1, 8, 64, 512])
    many = inputs(request, cluster, dp=8, recompute="block", micro_batch=sizes)
    together = memory_model.memory_bytes(many, sizes, 1), step_time.step_seconds(many, 512)
    for at, size in enumerate(sizes.tolist()):
        alone = inputs(request, cluster, dp=8, recompute="block", micro_batch=size)
        each = memory_model.memory_bytes(alone, size, 1), step_time.step_seconds(alone, 512)
        for whole, part in zip(together, each, strict=True):
            for name, value in part.items():
                assert np.broadcast_to(whole[name], sizes.shape)[at] == pytest.approx(float(value)), name


def test_chunks_take_less_memory_and_no_less_time() -> None:
    request = request_of(131072, "llama3-1b", 8)
    whole = request.changed(pin=request.pin.changed(loss_chunk=0, feed_forward_chunk=0))
    chunked = request.changed(pin=request.pin.changed(loss_chunk=1024, feed_forward_chunk=4096))
    for mode in ("none", "selective", "block"):
        steps = [inputs(each, cards("H100"), dp=8, recompute=mode) for each in (whole, chunked)]
        bytes_ = [sum(memory_model.memory_bytes(step, 1, 1).values()) for step in steps]
        seconds = [sum(step_time.step_seconds(step, 1).values()) for step in steps]
        assert bytes_[1] < bytes_[0]
        assert seconds[0] < seconds[1] < 1.2 * seconds[0]


def test_a_chunk_of_all_tokens_makes_no_product_smaller() -> None:
    work = inputs(request_of(4096, "llama3-1b"), cards("H100"), recompute="block").whole(1).rest
    chunked = token_chunks.by_chunks(work, 1 << 20)
    assert [product.flops for product in chunked.products] == [product.flops for product in work.products]
    assert [product.rows for product in chunked.products] == [product.rows for product in work.products]


def test_what_is_pinned_is_planned() -> None:
    plan = planned(request_of(4096, "llama3-1b", 8, loss_chunk=512, feed_forward_chunk=1024), cards("H200"))
    assert plan.state(TokenChunksState) == TokenChunksState(loss=512, feed_forward=1024)
    assert "Logits are computed 512 tokens at a time: it was set." in plan.why
    assert plan.layout.tp == 1
    assert plans.loads(plans.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("changes", "pin", "why"),
    [
        ({"precision": "fp16"}, {"loss_chunk": 512}, "the loss is scaled"),
        ({"compile": True}, {"feed_forward_chunk": 512}, "compiles blocks"),
        ({}, {"feed_forward_chunk": 512, "tp": 2}, "products of cut matrices"),
        ({}, {"feed_forward_chunk": 512, "schedule": "zero_bubble", "pp": 2}, "zero_bubble does not allow"),
    ],
)
def test_what_it_does_not_run_with_is_refused_by_name(changes: Any, pin: dict[str, Any], why: str) -> None:
    request = request_of(4096, "llama3-1b", 8).changed(**changes)
    with pytest.raises(UserError, match=why):
        planned(request.changed(pin=request.pin.changed(**pin)), cards("H200"))


def test_experts_and_other_models_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="feed-forwards that are no experts"):
        planned(request_of(512, "", 8, "moe", feed_forward_chunk=64), cards("H200"))
    assert planned(request_of(512, "", 8, "moe", loss_chunk=64), cards("H200")).state(TokenChunksState).loss == 64
    request = request_of(4096, "llama3-1b", 8)
    profile = replace(request.profile, facts={})
    with pytest.raises(UserError, match="not computed by chunks"):
        planned(replace(request, profile=profile).changed(pin=request.pin.changed(loss_chunk=8)), cards("H200"))


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"precision": "fp16"}, {}),
        ({"fsdp": True}, {}),
        ({"offload": plans.Offload(optimizer="disk", parameters="disk")}, {}),
    ],
)
def test_nothing_is_chosen_that_does_not_run(changes: dict[str, Any], layout: dict[str, Any]) -> None:
    step = inputs(request_of(1 << 20).changed(**changes), cards("H200"), hp=8, recompute="block", **layout)
    assert step.chunks(step.whole(1)) == (0, 0)


def test_feed_forwards_that_are_cut_or_put_off_are_whole() -> None:
    for layout in ({"tp": 2, "hp": 4}, {"pp": 2, "hp": 4, "schedule": "zero_bubble"}):
        step = inputs(request_of(1 << 20), cards("H200"), recompute="block", **layout)
        loss, feed_forward = step.chunks(step.whole(1))
        assert loss > 0
        assert feed_forward == 0
