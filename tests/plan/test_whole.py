"""One processor: whole states, feasible, deterministic, honest about pins and trials, clear when nothing fits."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asked import decoder, gpus, processor
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.cli import run_plan
from espalier.plan import base, refusals, search, trials
from espalier.plan.base import Layout, Plan
from espalier.plan.decide import decide
from espalier.plan.layout_decision import NEAR
from espalier.plan.layouts import view
from espalier.recipe import Adamw, Muon, Pin, ShardPin, defaults, recipe_file
from espalier.recipe.cost import ExpertSizes
from espalier.recipe.errors import UserError
from espalier.train import workload_registry

Seconds = Mapping[tuple[int, int], float]


def planned(request, cluster, seconds: Seconds | None = None) -> Plan:  # type: ignore[no-untyped-def]
    """The plan taken where a step of (ranks, threads) takes `seconds`, whatever the micro-batch."""

    def measure(plans: Sequence[Plan]) -> dict[trials.Key, float]:
        return {trials.key(one): seconds[len(one.ranks), one.ranks[0].threads] for one in plans}

    return decide(request, cluster, trials=measure if seconds else None).taken


@settings(max_examples=10, deadline=None)
@given(
    st.integers(1, 70), st.sampled_from([16, 64, 512]), st.sampled_from(["none", "selective", "block", None]),
    st.sampled_from([processor(), processor(6), processor(4, count=3), gpus(devices=2), gpus("T4", 3, devices=1)]),
)  # fmt: skip
def test_every_plan_covers_the_batch_fits_and_reads_back(batch, width, recompute, cluster) -> None:  # type: ignore[no-untyped-def]
    request = decoder(width=width, batch=batch, recompute=recompute)
    plan = planned(request, cluster)
    base.check(plan, batch)
    assert plan.predicted is not None
    assert plan.predicted.memory_bytes["peak"] <= plan.predicted.memory_limit
    assert sorted(rank for stage in plan.stages for rank in stage.ranks) == list(range(len(plan.ranks)))
    assert [layer for stage in plan.stages for layer in range(*stage.layers)] == list(range(request.profile.layers))
    assert plan.stages[0].micro_batches == plan.layout.accumulate
    assert recompute in (None, plan.recompute)
    assert base.loads(base.dumps(plan)) == plan


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (base.dumps(planned(decoder(), processor(8))) for _ in range(2))
    assert first == second


def test_every_divisor_of_the_cores_is_tried_at_the_micro_batch_that_is_best_there() -> None:
    asked: list[list[Plan]] = []

    def measure(plans: Sequence[Plan]) -> dict[trials.Key, float]:
        asked.append(list(plans))
        return {trials.key(one): 1.0 for one in plans}

    decide(decoder(), processor(6), trials=measure)
    assert sorted((len(plan.ranks), plan.ranks[0].threads) for plan in asked[0]) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert {(len(plan.ranks), plan.ranks[0].threads) for plan in asked[1]} == {(6, 1)}, "most ranks of a tie"


def test_what_was_measured_decides_and_is_said() -> None:
    one = planned(decoder(), processor(), {(1, 2): 0.010, (2, 1): 0.012})
    two = planned(decoder(), processor(), {(1, 2): 0.014, (2, 1): 0.012})
    assert (len(one.ranks), one.ranks[0].threads) == (1, 2)
    assert (len(two.ranks), two.ranks[0].threads) == (2, 1)
    assert one.predicted is not None
    assert one.predicted.step_seconds == 0.010
    (measured,) = [said for said in one.why if said.startswith("Measured steps: 1 rank x 2 threads, micro-batch ")]
    assert "2 ranks x 1 thread, micro-batch 8: 12 ms" in measured
    assert "20 % slower (measured 12 ms)" in [other.loses for other in one.runners_up]
    assert "17 % slower (measured 14 ms)" in [other.loses for other in two.runners_up]


def test_others_are_told_once_and_as_within_the_tie_only_where_they_are() -> None:
    measured = {(1, 2): 1.0, (2, 1): 0.9, (1, 6): 0.01, (2, 3): 0.02, (3, 2): 0.03, (6, 1): 0.06}
    faster = 0
    for width, cluster in itertools.product((64, 256, 1024), (processor(), processor(6), gpus(devices=2))):
        request = decoder(width=width, batch=16)
        tie = decide(request, cluster).search_result.tie
        for seconds in (None, measured):
            plan = planned(request, cluster, seconds)
            every = [(one.layout, one.threads) for one in plan.runners_up]
            assert all(every.count(one) == 1 for one in every)
            for one in plan.runners_up:
                if gain := re.match(r"([\d.]+)% faster", one.loses):
                    faster += 1
                    assert ("within the tie" in one.loses) == (float(gain[1]) / 100 <= tie + 1e-3), one.loses
    assert faster


def test_without_trials_estimates_decide() -> None:
    assert decide(decoder(), processor(), trials=lambda plans: {}).plan == decide(decoder(), processor()).plan


def test_of_trials_of_micro_batches_the_fastest_is_taken_and_of_equal_ones_the_smallest() -> None:
    def size(times: Mapping[int, float]) -> int:
        def measure(plans: Sequence[Plan]) -> dict[trials.Key, float]:
            return {trials.key(one): times.get(one.micro_batch, 2.0) for one in plans}

        request = decoder(batch=32, pin=Pin(ranks=1))
        estimated = decide(request, processor()).taken.micro_batch
        assert estimated == 32
        return decide(request, processor(), trials=measure).taken.micro_batch

    assert size({32: 1.0, 16: 0.9}) == 16
    assert size({32: 1.0, 16: 1.01}) == 16
    assert size({32: 1.0, 16: 1.1}) == 32


@pytest.mark.parametrize("cluster", [processor(4), gpus(devices=4)], ids=["processor", "GPUs"])
@pytest.mark.parametrize("faster", ["head first", "context first"])
def test_cut_plans_within_the_tie_are_all_tried_and_the_fastest_is_taken(cluster, faster) -> None:  # type: ignore[no-untyped-def]
    asked: set[trials.Key] = set()

    def measure(plans: Sequence[Plan]) -> dict[trials.Key, float]:
        asked.update(map(trials.key, plans))
        last = "context first" if faster == "context first" else "context 2"
        return {trials.key(one): 1.0 if trials.key(one).cut.endswith(last) else 1.1 for one in plans}

    request = decoder(layers=8, pin=Pin(ranks=4, hp=2, cp=2, micro_batch=4, shard=ShardPin(1, 1, 1)))
    plan = decide(request, cluster, trials=measure).taken
    assert {one.cut for one in asked} == {"heads 2, context 2", "heads 2, context 2, context first"}
    assert plan.placement == faster.replace(" ", "_")
    assert plan.predicted is not None
    assert plan.predicted.step_seconds == 1.0
    both = ("heads 2, context 2, micro-batch 4: 1.", "heads 2, context 2, context first, micro-batch 4: 1.")
    assert any(all(one in said for one in both) for said in plan.why)
    assert "10 % slower (measured 1.1 s)" in [other.loses for other in plan.runners_up]


def test_two_cut_plans_are_tried_in_real_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where that takes long, which here everything does, it is said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trials, "LEAST", 0.05)
    monkeypatch.setattr(run_plan, "LONG_STEP", 0.0)
    (tmp_path / "corpus").mkdir()
    for number in range(9):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"{number} and {number}\n" * 30)
    table = {
        "model": {"depth": 1, "width": 32, "heads": 2},
        "data": {"path": str(tmp_path / "corpus"), "validation": 0.2},
        "train": {"steps": 10**9, "sequence": 64, "batch_tokens": 128},
        "plan": {"pin": {"ranks": 4, "hp": 2, "cp": 2, "micro_batch": 1, "recompute": "none"}},
    }
    resolved = workload_registry.settle(recipe_file.from_table(table), tmp_path)
    plan = run_plan.choose(resolved, workload_registry.open_workload(resolved), processor(4))
    known = trials.Trials(resolved.recipe, processor(4)).known()
    assert {name.split("/")[1].count("context first") for name in known} == {0, 1}
    assert plan.predicted is not None
    assert plan.predicted.step_seconds in known.values()
    assert plan.predicted.step_seconds <= NEAR * min(known.values())
    said = capsys.readouterr().err
    assert "trying steps of " in said
    assert "4 ranks x 1 thread, heads 2, context 2, context first, micro-batch 1" in said


def test_all_gpus_are_used_and_others_stand_beside() -> None:
    plan = planned(decoder(width=2048, layers=8, sequence=1024, batch=256), gpus(count=4))
    assert len(plan.ranks) == 32
    assert plan.ranks[9].device == "cuda:1"
    assert plan.ranks[9].node == 1
    assert plan.exchanges == (base.Exchange(traffic="gradients"),)


def test_gpus_are_counted_as_gpus() -> None:
    request = decoder(width=2048, layers=8, sequence=1024, batch=256)
    assert " on 16 GPUs: " in planned(request, gpus(count=2)).why[0]
    assert " on 1 rank: " in planned(decoder(pin=Pin(ranks=1)), processor()).why[0]


def test_the_runners_up_of_gpus_are_the_fastest_of_each_other_kind() -> None:
    """Kinds differ in algorithm, stages, what is sharded, recomputation or ranks; each is estimated as the plan is."""
    request, cluster = decoder(width=2048, layers=8, sequence=1024, batch=256), gpus(count=4)
    plan, options = planned(request, cluster), search.search(request, cluster).options

    def kind(layout: Layout, ranks: int) -> tuple[object, ...]:
        sharded = tuple(count > 1 for count in layout.shard.values())
        return layout.algorithm, layout.pp > 1, sharded, layout.recompute, ranks

    fastest: dict[tuple[object, ...], float] = {}
    for one in options:
        fastest.setdefault(kind(view(one.layout, 1, "fp32"), int(one.layout.world)), one.seconds)
    told = [kind(other.layout, other.ranks) for other in plan.runners_up]
    assert len(told) == 6
    assert [other.step_seconds for other in plan.runners_up] == [fastest[one] for one in told]
    mine = kind(plan.layout, len(plan.ranks))
    assert told == [one for one in sorted(fastest, key=lambda one: fastest[one]) if one != mine][:6]


def test_more_gpus_than_samples_are_left_idle_and_it_is_said() -> None:
    plan = planned(decoder(batch=3), gpus())
    assert len(plan.ranks) <= 3
    assert any("of 8 devices are left out" in sentence for sentence in plan.why)


def test_one_rank_exchanges_nothing() -> None:
    assert planned(decoder(batch=1), processor()).exchanges == ()


def test_recomputation_comes_only_when_memory_demands_it() -> None:
    large = decoder(width=512, layers=16, sequence=2048, batch=4)
    assert planned(large, processor(memory="64GiB")).recompute == "none"
    tight = planned(large, processor(memory="1.5GiB"))
    assert tight.recompute == "block"
    assert "Activations are recomputed (block): without, nothing fits in 1.35 GiB." in tight.why


@settings(max_examples=10, deadline=None)
@given(st.floats(0.5, 64), st.floats(1, 8))
def test_more_memory_is_never_less_feasible(gibibytes: float, factor: float) -> None:
    request = decoder(width=512, layers=16, sequence=1024, batch=4)
    before, after = (
        decide(request, processor(memory=f"{size:.6f}GiB")).fits for size in (gibibytes, gibibytes * factor)
    )
    assert after >= before


def test_pins_are_kept_and_named() -> None:
    pinned = planned(decoder(pin=Pin(ranks=2, threads=4, micro_batch=8, recompute="block")), processor())
    assert (len(pinned.ranks), pinned.ranks[0].threads, pinned.micro_batch, pinned.recompute) == (2, 4, 8, "block")
    told = " ".join(pinned.why)
    for said in ("2 ranks were asked for", "Micro-batch 8: it was set", "it was set", "share 2 cores"):
        assert said in told


def test_pinned_ranks_share_the_cores() -> None:
    assert planned(decoder(pin=Pin(ranks=3)), processor(8)).ranks[0].threads == 2
    assert len(planned(decoder(pin=Pin(ranks=5)), processor(8, count=2)).ranks) == 5


def test_a_mixed_cluster_is_told_that_the_slowest_sets_the_step() -> None:
    fast, slow = gpus("H100", devices=1), gpus("T4", devices=1)
    mixed = msgspec.structs.replace(fast, nodes=(*fast.nodes, *slow.nodes))
    plan = planned(decoder(batch=2, pin=Pin(ranks=2)), mixed)
    assert any("slowest sets the step" in sentence for sentence in plan.why)


def test_machines_without_a_gpu_are_left_out_and_it_is_said() -> None:
    mixed = msgspec.structs.replace(gpus(), nodes=(*processor().nodes, *gpus(devices=2).nodes))
    plan = planned(decoder(pin=Pin(ranks=2)), mixed)
    assert [rank.node for rank in plan.ranks] == [1, 1]
    assert any("without a GPU" in sentence for sentence in plan.why)


BAD = [
    (Pin(ranks=17), processor(), "more than the 16 samples"),
    (Pin(ranks=9), gpus(), "more than the 8 devices"),
    (Pin(ranks=0), processor(), r"plan.pin.ranks = 0 is not possible"),
    (Pin(threads=-1), processor(), r"plan.pin.threads = -1 is not possible"),
    (Pin(ranks=4, dp=4, micro_batch=5), processor(), "leaves no layout"),
    (Pin(micro_batch=17), processor(), r"plan\.pin\.micro_batch = 17 leaves no layout.*micro_batch=16"),
]


@pytest.mark.parametrize(("pin", "cluster", "said"), BAD, ids=[said for _, _, said in BAD])
def test_pins_that_cannot_be_met_are_refused(pin, cluster, said) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        planned(decoder(pin=pin), cluster)
    assert re.search(said, str(caught.value), re.DOTALL)


def test_experts_that_leave_no_layout_are_refused_with_one_that_does() -> None:
    pin = Pin(ep=2, dp=1, sp=1)
    request = decoder(pin=pin, facts={"expert_parallel": ExpertSizes(8, 2, 1000.0)})
    with pytest.raises(UserError, match=r"leaves no layout[^!]*dp x sp, which ep divides[^!]*plan\.pin\.dp=2"):
        planned(request, gpus())


@pytest.mark.parametrize("cluster", [gpus("V100-32GB")])
def test_a_precision_the_gpu_lacks_is_refused(cluster) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="V100-32GB has no rate for bf16"):
        planned(decoder(precision="bf16"), cluster)


def test_states_that_do_not_fit_are_named_with_what_is_missing() -> None:
    request = decoder(width=8192, layers=40, precision="bf16")
    with pytest.raises(refusals.DoesNotFit) as caught:
        planned(request, gpus(devices=2))
    told = str(caught.value)
    assert "are missing, most of it optimizer" in told
    assert "8 A100-80GB in the machine instead of 2" in told


def test_muon_is_not_advised_to_who_has_it() -> None:
    muon = decoder(width=8192, layers=40, optimizer=Muon())
    with pytest.raises(UserError) as caught:
        planned(muon, processor(memory="16GiB"))
    assert "kind=muon" not in str(caught.value)
    assert "model.depth" not in str(caught.value)  # a named shape has no depth to change


def training_bytes(plan: Plan) -> float:
    """The peak without the copy of a checkpoint, which a plan can do without."""
    assert plan.predicted is not None
    return plan.predicted.memory_bytes["peak"] - plan.predicted.memory_bytes["staging"]


def test_an_optimizer_that_holds_less_is_advised_where_it_fits() -> None:
    matrices = Counter({(512, 512): 1000})
    room = processor(1, "64GiB")
    muon = decoder(width=512, layers=80, batch=1, optimizer=Muon(), matrices=matrices)
    adamw = muon.changed(optimizer=Adamw())
    held = [training_bytes(planned(one, room)) for one in (muon, adamw)]
    assert held[0] < held[1]
    found = decide(adamw.changed(memory=sum(held) / 2), room)
    assert "train.optimizer.kind=muon" in str(found.refusal())
    assert decide(muon.changed(memory=sum(held) / 2), room).fits


@pytest.mark.parametrize("cluster", [gpus(), processor(4, "1GiB"), processor(2, "1GiB", count=2)])
def test_devices_of_the_advised_memory_suffice(cluster) -> None:  # type: ignore[no-untyped-def]
    request = decoder(width=4096, layers=60, heads=0, pin=Pin(ranks=1) if cluster == gpus() else Pin())
    with pytest.raises(UserError) as caught:
        planned(request, cluster)
    advised = re.search(r"devices with ([\d.]+) (\w+) of memory", str(caught.value))
    assert advised
    assert ("plan.pin.ranks out" in str(caught.value)) == (cluster == gpus()), "a cheaper change, and tried"
    memory = round(float(advised[1]) * 1.01 * 1024 ** (("KiB", "MiB", "GiB", "TiB").index(advised[2]) + 1))
    nodes = tuple(
        msgspec.structs.replace(node, device=msgspec.structs.replace(node.device, memory=memory))
        for node in cluster.nodes
    )
    assert planned(request, msgspec.structs.replace(cluster, nodes=nodes)).executable


@pytest.mark.parametrize("cluster", [gpus(devices=2), processor(4, "1GiB")])
def test_the_closest_plan_is_priced_and_says_what_it_lacks(cluster) -> None:  # type: ignore[no-untyped-def]
    found = decide(decoder(width=8192, layers=40), cluster)
    assert not found.fits
    assert not found.plan.executable
    assert found.plan.predicted is not None
    assert found.plan.predicted.memory_bytes["peak"] > found.plan.predicted.memory_limit
    assert found.plan.missing.split(" of memory")[0] + " are missing" in str(found.refusal())
    assert base.loads(base.dumps(found.plan)) == found.plan


def test_much_slower_is_said_in_times() -> None:
    def loses(times: float) -> str:
        plan = planned(decoder(), processor(), {(1, 2): 1.0, (2, 1): times})
        return next(other.loses for other in plan.runners_up if other.ranks == 2)

    assert loses(1.99) == "99 % slower (measured 2.0 s)"
    assert loses(2) == "2x slower (measured 2.0 s)"
    assert loses(2.46).startswith("2.5x slower")
    assert loses(11.92).startswith("12x slower")
    assert loses(1500).startswith("1,500x slower")


def test_activations_that_do_not_fit_are_named_with_their_cure() -> None:
    sizes: dict[str, Any] = {"width": 512, "layers": 16, "batch": 4, "pin": Pin(micro_batch=4, recompute="none")}
    large = decoder(sequence=8192, request_of=lambda recipe: decoder(sequence=recipe.train.sequence, **sizes), **sizes)
    with pytest.raises(UserError) as caught:
        planned(large, processor(memory="6GiB"))
    told = str(caught.value)
    assert "most of it activations" in told
    assert "leave plan.pin.micro_batch, plan.pin.recompute out" in told
    assert "train.sequence=1024 (" in told
    assert "train.sequence=4096" not in told


def test_the_missing_bytes_are_the_ones_that_would_suffice() -> None:
    """With the memory the error asks for, the same request fits."""
    request = decoder(width=1024, layers=24)
    with pytest.raises(UserError) as caught:
        planned(request, processor(memory="1GiB"))
    assert "do" in vars(caught.value)
    assert planned(request, processor(memory="16GiB")).predicted is not None


def test_of_trials_that_differ_little_the_one_with_most_ranks_is_taken() -> None:
    def ranks(two: float) -> int:
        return len(planned(decoder(), processor(), {(1, 2): 1.0, (2, 1): two}).ranks)

    assert ranks(1.015) == 2
    assert ranks(1.025) == 1
    assert ranks(0.5) == 2


def test_trials_of_one_phase_are_not_those_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = defaults.resolve(recipe_file.from_table({"model": {"depth": 1, "width": 32}, "train": {"steps": 10**9}}))[
        0
    ]
    plans = [decide(decoder(pin=Pin(ranks=ranks)), processor()).taken for ranks in (1, 2)]
    seconds = iter([1.0, 2.0, 1.0, 2.0, 30.0, 40.0, 30.0, 40.0])
    first, later = (
        trials.Trials(recipe, processor(), lambda plan, fastest: next(seconds), phase) for phase in (0, 100)
    )
    assert sorted(first(plans).values()) == [1.0, 2.0]
    assert sorted(later(plans).values()) == [30.0, 40.0]
    assert sorted(first(plans).values()) == [1.0, 2.0], "kept, and measured no more"
    assert next(seconds, None) is None
