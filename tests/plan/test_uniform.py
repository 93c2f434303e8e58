"""The plain planner: feasible, deterministic, honest about pins and trials, and clear when nothing fits."""

from __future__ import annotations

import re

import msgspec
import pytest
from asked import decoder, gpus, processor
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.config import Pin
from espalier.errors import UserError
from espalier.plan import base, reasons, uniform


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70), st.sampled_from([16, 64, 512]), st.sampled_from(["none", "selective", "block", None]),
    st.sampled_from([processor(), processor(6), processor(4, count=3), gpus(devices=2), gpus("T4", 3, devices=1)]),
)  # fmt: skip
def test_every_plan_covers_the_batch_fits_and_reads_back(batch, width, recompute, cluster) -> None:  # type: ignore[no-untyped-def]
    request = decoder(width=width, batch=batch, recompute=recompute)
    for plan in uniform.candidates(request, cluster):
        cuts = [rank.share for rank in plan.ranks]
        assert [i for start, stop in cuts for i in range(start, stop)] == list(range(batch))
        assert all(stop > start for start, stop in cuts)
        assert plan.predicted is not None
        assert plan.predicted.memory_bytes["peak"] <= plan.predicted.memory_limit
        assert plan.stages[0].ranks == tuple(range(len(plan.ranks)))
        assert plan.stages[0].layers == (0, request.layers)
        assert plan.stages[0].micro_batches == plan.layout.accumulate
        assert recompute in (None, plan.recompute)
        assert base.loads(base.dumps(plan)) == plan


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (base.dumps(uniform.plan(decoder(), processor(8))) for _ in range(2))
    assert first == second


def test_processors_try_every_divisor_and_the_best_comes_first() -> None:
    found = uniform.candidates(decoder(), processor(6))
    assert sorted((len(plan.ranks), plan.ranks[0].threads) for plan in found) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    seconds = [plan.predicted.step_seconds for plan in found if plan.predicted]
    assert seconds == sorted(seconds)


def test_what_was_measured_decides_and_is_said() -> None:
    one = uniform.plan(decoder(), processor(), {(1, 2): 0.010, (2, 1): 0.012})
    two = uniform.plan(decoder(), processor(), {(1, 2): 0.014, (2, 1): 0.012})
    assert (len(one.ranks), one.ranks[0].threads) == (1, 2)
    assert (len(two.ranks), two.ranks[0].threads) == (2, 1)
    assert one.predicted is not None
    assert one.predicted.step_seconds == 0.010
    assert one.why[0] == "Tried here, per step: 1 rank x 2 threads 10 ms, 2 ranks x 1 thread 12 ms."
    assert one.runners_up[0].loses == "20 % slower (measured 12 ms)"
    assert two.runners_up[0].loses == "17 % slower (measured 14 ms)"


def test_a_trial_of_something_else_changes_nothing() -> None:
    assert uniform.plan(decoder(), processor(), {(7, 7): 1e-9}) == uniform.plan(decoder(), processor())


def test_all_gpus_are_used_and_fewer_stand_beside() -> None:
    plan = uniform.plan(decoder(batch=256), gpus(count=4))
    assert len(plan.ranks) == 32
    assert plan.ranks[9].device == "cuda:1"
    assert plan.ranks[9].node == 1
    assert {other.ranks for other in plan.runners_up} == {1, 8, 32}
    assert plan.exchanges == (base.Exchange(traffic="gradients"),)


def test_more_gpus_than_samples_are_left_idle_and_it_is_said() -> None:
    plan = uniform.plan(decoder(batch=3), gpus())
    assert len(plan.ranks) == 3
    assert "Only 3 of 8 GPUs have work" in plan.why[0]


def test_one_rank_exchanges_nothing() -> None:
    assert uniform.plan(decoder(batch=1), processor()).exchanges == ()


def test_recomputation_comes_only_when_memory_demands_it() -> None:
    large = decoder(width=512, layers=16, sequence=2048, batch=4)
    assert uniform.plan(large, processor(memory="64GiB")).recompute == "none"
    tight = uniform.plan(large, processor(memory="1.5GiB"))
    assert tight.recompute == "block"
    assert any(sentence.startswith("Recompute block: with less,") for sentence in tight.why)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.5, 64), st.floats(1, 8))
def test_more_memory_is_never_less_feasible(gibibytes: float, factor: float) -> None:
    request = decoder(width=512, layers=16, sequence=1024, batch=4)
    found = []
    for size in (gibibytes, gibibytes * factor):
        try:
            found.append(len(uniform.candidates(request, processor(memory=f"{size:.6f}GiB"))))
        except UserError:
            found.append(0)
    assert found[0] <= found[1]


def test_pins_are_kept_and_named() -> None:
    pinned = uniform.plan(decoder(pin=Pin(ranks=2, threads=4, micro_batch=8, recompute="block")), processor())
    assert (len(pinned.ranks), pinned.ranks[0].threads, pinned.micro_batch, pinned.recompute) == (2, 4, 8, "block")
    told = " ".join(pinned.why)
    for said in ("2 ranks were asked for", "plan.pin.micro_batch was set", "it was set", "more than the 2 cores"):
        assert said in told


def test_pinned_ranks_share_the_cores() -> None:
    assert uniform.plan(decoder(pin=Pin(ranks=3)), processor(8)).ranks[0].threads == 2
    assert len(uniform.plan(decoder(pin=Pin(ranks=5)), processor(8, count=2)).ranks) == 5


def test_a_mixed_cluster_is_told_that_the_slowest_sets_the_step() -> None:
    fast, slow = gpus("H100", devices=1), gpus("T4", devices=1)
    plan = uniform.plan(decoder(), msgspec.structs.replace(fast, nodes=(*fast.nodes, *slow.nodes)))
    assert any("slowest device sets the step" in sentence for sentence in plan.why)


def test_machines_without_a_gpu_are_left_out_and_it_is_said() -> None:
    mixed = msgspec.structs.replace(gpus(), nodes=(*processor().nodes, *gpus(devices=2).nodes))
    plan = uniform.plan(decoder(), mixed)
    assert [rank.node for rank in plan.ranks] == [1, 1]
    assert any("without a GPU" in sentence for sentence in plan.why)


BAD = [
    (Pin(ranks=17), processor(), "more than the 16 samples"),
    (Pin(ranks=9), gpus(), "more than the 8 GPUs"),
    (Pin(ranks=0), processor(), r"plan.pin.ranks = 0 is not possible"),
    (Pin(threads=-1), processor(), r"plan.pin.threads = -1 is not possible"),
    (Pin(ranks=4, micro_batch=5), processor(), "more than a rank's share"),
    (Pin(micro_batch=17), processor(), "more than a rank's share"),
]


@pytest.mark.parametrize(("pin", "cluster", "said"), BAD, ids=[said for _, _, said in BAD])
def test_pins_that_cannot_be_met_are_refused(pin, cluster, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=said):
        uniform.plan(decoder(pin=pin), cluster)


def test_a_precision_the_gpu_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="V100-32GB has no rate for bf16"):
        uniform.plan(decoder(precision="bf16"), gpus("V100-32GB"))


def test_states_that_do_not_fit_are_named_with_what_is_missing() -> None:
    request = decoder(width=8192, layers=40, precision="bf16")
    with pytest.raises(UserError) as caught:
        uniform.plan(request, gpus())
    told = str(caught.value)
    assert "are missing, most of it optimizer" in told
    assert "train.optimizer.kind=muon" in told
    assert "devices with at least" in told
    assert "optimizer 240 GiB" in told
    assert "every rank holds the whole model" in told
    assert "espalier explain amsp" in told


def test_muon_is_not_advised_to_who_has_it() -> None:
    muon = decoder(width=8192, layers=40, optimizer="muon")
    with pytest.raises(UserError) as caught:
        uniform.plan(muon, gpus())
    assert "kind=muon" not in str(caught.value)
    assert "model.depth" not in str(caught.value)  # a named shape has no depth to change


@pytest.mark.parametrize("cluster", [gpus(), processor(4, "1GiB"), processor(2, "1GiB", count=2)])
def test_devices_of_the_advised_memory_suffice(cluster) -> None:  # type: ignore[no-untyped-def]
    request = decoder(width=4096, layers=60)
    with pytest.raises(UserError) as caught:
        uniform.plan(request, cluster)
    advised = re.search(r"devices with at least ([\d.]+) (\w+) each", str(caught.value))
    assert advised
    memory = round(float(advised[1]) * 1.01 * 1024 ** (("KiB", "MiB", "GiB", "TiB").index(advised[2]) + 1))
    nodes = tuple(
        msgspec.structs.replace(node, device=msgspec.structs.replace(node.device, memory=memory))
        for node in cluster.nodes
    )
    assert uniform.plan(request, msgspec.structs.replace(cluster, nodes=nodes)).executable


@pytest.mark.parametrize("cluster", [gpus(), processor(4, "1GiB")])
def test_the_closest_plan_is_priced_and_says_what_it_lacks(cluster) -> None:  # type: ignore[no-untyped-def]
    request = decoder(width=8192, layers=40)
    with pytest.raises(reasons.DoesNotFit) as caught:
        uniform.plan(request, cluster)
    plan = uniform.closest(request, cluster)
    assert not plan.executable
    assert plan.predicted is not None
    assert plan.predicted.memory_bytes["peak"] > plan.predicted.memory_limit
    assert plan.missing.split(" of memory")[0] + " are missing" in str(caught.value)
    assert base.loads(base.dumps(plan)) == plan


def test_much_slower_is_said_in_times() -> None:
    def loses(times: float) -> str:
        measured = {(1, 2): 1.0, (2, 1): times}
        return uniform.plan(decoder(), processor(), measured).runners_up[0].loses

    assert loses(1.99) == "99 % slower (measured 2.0 s)"
    assert loses(2) == "2x slower (measured 2.0 s)"
    assert loses(2.46).startswith("2.5x slower")
    assert loses(11.92).startswith("12x slower")
    assert loses(1500).startswith("1,500x slower")


def test_gpus_are_counted_as_gpus() -> None:
    assert uniform.plan(decoder(batch=256), gpus(count=2)).why[0].startswith("16 GPUs: ")


def test_activations_that_do_not_fit_are_named_with_their_cure() -> None:
    large = decoder(width=512, layers=16, sequence=8192, batch=4, pin=Pin(micro_batch=4, recompute="none"))
    with pytest.raises(UserError) as caught:
        uniform.plan(large, processor(memory="4GiB"))
    told = str(caught.value)
    assert "most of it activations" in told
    assert "plan.pin.micro_batch=1" in told
    assert 'plan.pin.recompute="block"' in told
    assert "train.sequence" in told


def test_the_missing_bytes_are_the_ones_that_would_suffice() -> None:
    """With the memory the error asks for, the same request fits."""
    request = decoder(width=1024, layers=24, optimizer="adamw")
    with pytest.raises(UserError) as caught:
        uniform.plan(request, processor(memory="1GiB"))
    assert "do" in vars(caught.value)
    assert uniform.plan(request, processor(memory="16GiB")).predicted is not None


def test_of_trials_that_differ_little_the_one_with_most_ranks_is_taken() -> None:
    def ranks(two: float) -> int:
        return len(uniform.plan(decoder(), processor(), {(1, 2): 1.0, (2, 1): two}).ranks)

    assert ranks(1.04) == 2
    assert ranks(1.06) == 1
    assert ranks(0.5) == 2
