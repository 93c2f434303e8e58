"""Bytes: the activations that autograd keeps, plain data parallelism in the limit, fewer states with more shards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from asked import decoder, gpus, processor, states
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from espalier import recipe as config
from espalier.language import gpt
from espalier.language.operation_counts import DecoderLoad
from espalier.plan import collective_time, cost_inputs, memory_model
from espalier.plan.axes.sharding import StateBytes
from espalier.plan.cost_inputs import CostInputs
from espalier.plan.layouts import MODES, Layouts, chains
from espalier.plan.reference_models import FULL, MIXED
from espalier.plan.request import Request
from espalier.recipe import decoder_shapes, defaults
from espalier.recipe.cost import Cut, Profile

BATCH, SEQUENCE, VOCABULARY = 4, 128, 512


def options(**more: Any) -> config.Gpt:
    sizes: dict[str, Any] = {
        "depth": 2, "width": 192, "heads": 4, "feed_forward": 512, "vocabulary": VOCABULARY, "context": SEQUENCE
    }  # fmt: skip
    return defaults.resolve(config.Recipe(model=config.Gpt(**{**sizes, **more})))[0].model  # type: ignore[return-value]


def request(chosen: config.Gpt) -> Request:
    parameters = decoder_shapes.parameter_count(chosen)

    def anatomy(micro_batch: Any, recompute: str, precision: str, cut: Cut) -> Any:
        return gpt.work(DecoderLoad(decoder_shapes.sizes(chosen), SEQUENCE, micro_batch, recompute, precision, cut))

    profile = Profile(
        parameters=parameters,
        trainable=parameters,
        layers=chosen.depth or 0,
        global_batch=BATCH,
        tokens_per_sample=SEQUENCE,
        anatomy=anatomy,
    )
    return Request(profile=profile)


def held(asked: Request, layout: Layouts, nodes: int = 1, size: int = BATCH, in_flight: int = 1) -> dict[str, float]:
    on = collective_time.fleet(gpus(count=nodes), 8 * nodes)
    found = memory_model.memory_bytes(CostInputs(asked, on, on.kinds[0], layout), size, in_flight)
    return {name: float(value) for name, value in found.items()}


def tracked(chosen: config.Gpt, mode: str) -> tuple[int, int]:
    """Bytes of activations between forward and backward, and of all a step holds at its peak. Nothing is computed."""
    with FakeTensorMode():
        model = gpt.GPT(chosen)
        gpt.recompute(model, mode)
        tokens, targets = torch.zeros(2, BATCH, SEQUENCE, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            loss = model.loss_sum(tokens, targets)
            between = tracker.get_tracker_snapshot("current")
            loss.backward()
        peak = tracker.get_tracker_snapshot("peak")
    (now,), (most,) = between.values(), peak.values()
    kept = {getattr(kind, "name", kind): size for kind, size in now.items()}["ACT"]
    return kept, most["Total"]


@pytest.mark.extremes
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.slow), {"kv_heads": 2, "tied": True}])
def test_activations_are_within_5_per_cent_of_the_memory_tracker_s(mode: str, changes: dict[str, Any]) -> None:
    chosen = options(**changes)
    kept, peak = tracked(chosen, mode)
    log_softmax = BATCH * SEQUENCE * VOCABULARY * 4  # the planner's worst moment, not what waits for backward
    found = held(request(chosen), Layouts(recompute=mode, micro_batch=BATCH))
    assert found["activations"] == pytest.approx(kept - log_softmax, rel=0.05)
    assert sum(found[name] for name in ("params", "grads", "activations", "transient")) >= peak


@given(
    st.integers(1, 10**6), st.sampled_from([FULL, MIXED, StateBytes(2, 4, 12)]), st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 4]),
)  # fmt: skip
def test_shards_of_one_rank_are_plain_data_parallelism(parameters: int, each: StateBytes, dp: int, micro: int) -> None:
    found = states(parameters, each, Layouts(dp=dp, micro_batch=micro))
    assert sum(found.values()) == pytest.approx(sum(each) * parameters)


@pytest.mark.parametrize("storage", [FULL, MIXED])
def test_every_shard_of_a_group_together_is_the_whole(storage: StateBytes) -> None:
    params, grads, optimizer = chains(64, 8).T
    found = states(2**20, storage, Layouts(dp=64, params=params, grads=grads, optimizer=optimizer))
    assert found["params"] * params == pytest.approx(storage.params * 2**20)
    assert found["grads"] * grads == pytest.approx(storage.grads * 2**20)
    assert found["optimizer"] * optimizer == pytest.approx(storage.optimizer * 2**20)


def test_nothing_but_the_model_is_held_without_peers() -> None:
    found = held(decoder(storage=MIXED), Layouts(micro_batch=2))
    assert found["gathered"] == found["buckets"] == 0
    assert found["runtime"] == memory_model.CUDA_RUNTIME


def test_more_shards_hold_fewer_bytes_of_states() -> None:
    rows = [tuple(map(int, row)) for row in chains(8, 8)]

    def total(params: int, grads: int, optimizer: int) -> float:
        layout = Layouts(dp=8, params=params, grads=grads, optimizer=optimizer)
        return sum(held(decoder(storage=MIXED), layout)[name] for name in ("params", "grads", "optimizer"))

    found = {row: total(*row) for row in rows}
    for few, many in itertools.permutations(rows, 2):
        if all(one <= other for one, other in zip(few, many, strict=True)):
            assert found[many] < found[few]


@given(st.sampled_from(MODES), st.sampled_from([2, 4]), st.integers(1, 12))
def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages(mode: str, pp: int, in_flight: int) -> None:
    """1F1B: what a whole replica keeps of one micro-batch's layers, whatever the number of stages."""
    wide = decoder(layers=8, width=256, sequence=1024, heads=8)
    whole = held(wide, Layouts("data", mode), size=1, in_flight=in_flight)["activations"]
    staged = held(wide, Layouts("data", mode, pp=pp), size=1, in_flight=in_flight)["activations"]
    given = 1024 * 256 * 4  # what the stage gives, until its gradient comes
    assert staged == pytest.approx(min(pp, in_flight) * (whole / pp + given))


@pytest.mark.parametrize("algorithm", ["megatron", "fsp", "isp"])
def test_recomputation_keeps_less_however_the_model_is_cut(algorithm: str) -> None:
    cut = {"hp": 4} if algorithm == "isp" else {"tp": 4}
    kept = [held(request(options()), Layouts(algorithm, mode, 2, **cut))["activations"] for mode in MODES]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] < held(request(options()), Layouts("data", "none", 8))["activations"]


@pytest.mark.parametrize(
    ("name", "least"), [("RTX 3060", 0.87), ("RTX 3090", 0.9), ("RTX 4060", 0.84), ("A100-80GB", 0.93)]
)
def test_a_card_keeps_what_its_size_allows(name: str, least: float) -> None:
    """Before anything is held: a small card loses little more of its memory than a large one."""
    on = collective_time.fleet(gpus(name, devices=1), 1)
    nothing = cost_inputs.limit(on.kinds[0], decoder()) - memory_model.CUDA_RUNTIME
    assert least < nothing / on.kinds[0].table.device.memory < 0.96


def on_processor(asked: Request) -> dict[str, float]:
    on = collective_time.fleet(processor(), 2)
    found = memory_model.memory_bytes(CostInputs(asked, on, on.kinds[0], Layouts(dp=2)), 4, 1)
    return {name: float(value) for name, value in found.items()}


def test_on_a_processor_only_what_comes_and_goes_leaves_pieces() -> None:
    few = on_processor(decoder(precision="fp32"))
    assert few["slack"] == pytest.approx(memory_model.SLACK["cpu"] * (few["activations"] + few["transient"]))


def test_libraries_of_a_workload_count_on_a_processor() -> None:
    more = on_processor(decoder(loaded=2**26))["runtime"] - on_processor(decoder())["runtime"]
    assert more == 2**26
