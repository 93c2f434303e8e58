"""Gradients are exchanged in pieces that the plan states: larger on many ranks, and the executor takes the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from asked import decoder, gpus

from espalier.plan import collective_time, step_time
from espalier.plan.axes.flat_layout import BUCKET
from espalier.plan.cost_inputs import EACH, LARGEST, CostInputs
from espalier.plan.decide import decide
from espalier.plan.layouts import Layouts
from espalier.plan.reference_models import MIXED
from espalier.plan.request import Request


def asked(**more: object) -> Request:
    return decoder(4096, 8, sequence=2048, batch=2048, precision="bf16", heads=32, storage=MIXED, **more)


def step(ranks: int, **more: object) -> CostInputs:
    on = collective_time.fleet(gpus(count=ranks // 8), ranks)
    return CostInputs(asked(**more), on, on.kinds[0], Layouts("data", dp=ranks))


@pytest.mark.parametrize("ranks", [8, 16, 64, 512, 2048])
def test_a_piece_grows_with_the_ranks_that_sum_it(ranks: int) -> None:
    assert step(ranks).bucket_bytes == min(max(BUCKET, ranks * EACH), LARGEST)
    assert step(ranks, bucket="7B").bucket_bytes == 7


def test_on_many_ranks_small_pieces_cost_more_than_the_plan_s_own() -> None:
    def shown(bucket: int | None, ranks: int) -> float:
        found = step(ranks, bucket="auto" if bucket is None else f"{bucket}B")
        found = replace(found, layouts=Layouts("data", dp=ranks, optimizer=ranks))
        return float(step_time.step_seconds(found, 1)["all_reduce"])

    assert shown(BUCKET, 1024) > 2 * shown(None, 1024)
    assert shown(BUCKET, 8) == shown(None, 8)


def test_the_last_piece_is_never_hidden_and_a_single_one_not_at_all() -> None:
    whole = step_time.exposed(4.0, 1, 100.0, 0.0, late=True)
    pieces = [float(step_time.exposed(4.0 / n, n, 100.0, 0.0, late=True)) for n in (2, 4, 8)]
    assert (whole, pieces) == (4.0, [2.0, 1.0, 0.5])
    assert step_time.exposed(4.0, 1, 100.0, 0.0) == 0.0


def test_gradients_that_wait_for_the_last_micro_batch_are_shown_whole() -> None:
    beside, after = (step_time.step_seconds(step(64, overlap=overlap), 32)["all_reduce"] for overlap in (True, False))
    assert float(after) == pytest.approx(float(step_time.gradients(step(64))["seconds"]))
    assert float(beside) < float(after)


def test_the_plan_says_how_large_pieces_are_and_why() -> None:
    plan = decide(asked().changed(pin=step(64).request.pin), gpus(count=64)).taken
    ranks = plan.layout.dp * plan.layout.sp // plan.layout.shard["grads"]
    assert plan.bucket == int(np.clip(ranks * EACH, BUCKET, LARGEST))
    assert any("pieces of" in one for one in plan.why) == (plan.bucket > BUCKET and plan.layout.shard["params"] == 1)
