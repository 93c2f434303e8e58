"""docs/advice.md is what the planner says today, its numbers are those of the predictions, and an expert would agree.

What an expert would accept is written as facts: the layout's shape, memory under its limit, a step within an interval
of MFU, and which hardware the words name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from espalier.plan.base import Plan, Predicted
from espalier.recipe import units

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import advice  # noqa: E402

PAGE = (ROOT / "docs" / "advice.md").read_text(encoding="utf-8")
QUESTIONS = {one.title: one for one in advice.QUESTIONS}
PLANTED = [title for title, one in QUESTIONS.items() if "planted:" in one.recipe]
LIMIT = {
    "V100-16GB": 16,
    "A100-80GB": 80,
    "H100": 80,
    "RTX 3060": 12,
    "RTX 3090": 24,
    "RTX 4090": 24,
    "T4": 16,
    "RTX 4070": 12,
    "RTX 4070 Laptop": 8,
    "RTX 5090": 32,
    "L40S": 48,
    "H200": 141,
    "H800": 80,
    "B200": 192,
    "MI300X": 206,
    "cpu": 128,
}
"""GB that a device of this name has, at most what a plan may hold."""


def planned(title: str) -> tuple[Plan, Predicted]:
    """The plan that answers a question."""
    plan = QUESTIONS[title].answer.taken
    assert plan.predicted is not None
    return plan, plan.predicted


def said(title: str, *words: str) -> bool:
    """Whether one sentence of the answer has all these words."""
    return any(all(word in sentence for word in words) for sentence in QUESTIONS[title].answer.plan.why)


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_all_questions_and_no_other() -> None:
    assert len(QUESTIONS) == 36
    assert re.findall(r"^## (.*)$", PAGE, re.M) == list(QUESTIONS)
    assert PAGE.startswith(advice.HEAD)


@pytest.mark.extremes
@pytest.mark.parametrize("title", QUESTIONS)
def test_the_page_says_what_the_planner_says(title: str) -> None:
    _, _, rest = PAGE.partition(f"## {title}\n")
    shown = rest.partition("\n## ")[0].strip()
    fresh = answered(title).partition(f"## {title}\n")[2].strip()
    assert shown == fresh, "make pages"


def answered(title: str) -> str:
    """What the planner says."""
    return answered_apart()[title] if title in PLANTED else "\n".join(advice.section(QUESTIONS[title]))


@cache
def answered_apart() -> dict[str, str]:
    """Of graphs: an order begins where NumPy's argsort puts the first node of least degree, as SciPy's does. Which of
    several that is depends on the processor's vector instructions, so a program of its own goes without them."""
    program = (
        f"import json, sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import advice\n"
        f"told = [one for one in advice.QUESTIONS if one.title in {PLANTED!r}]\n"
        "print(json.dumps({one.title: '\\n'.join(advice.section(one)) for one in told}))"
    )
    plain = {**os.environ, "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=plain, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told


# --- text = numbers --------------------------------------------------------------------------------------------------

SIZE, SECONDS = r"\d[\d,.]* (?:[KMGTP]i)?B", r"(?:\d+ h )?(?:\d+ min )?\d[\d,.]* (?:h|min|s|ms|µs)"
QUANTITY = re.compile(rf"(?<![\w.])(?:{SIZE}|{SECONDS})(?![\w/])")


BESIDE = (
    "2 copies", "4 copies", "1 copy", "No copies", "Copies in memory",  # of a state, in host memory
    "Format:",  # of one sparse product
    "The exchange of all parameters", "Over the link",  # a round's flight, and other plans
    "Gradients are exchanged in pieces",  # of a bucket
    "Experts are spread over", "A step takes",  # steps of plans with other groups
    "With the best equal layout",  # a step of another plan
    "Pipeline ",  # of several unequal ones, without what they do together
    "Logits are computed",  # what all at once would take
    "A step takes",  # with experts held otherwise
    "Pipeline ",  # of its own samples
    "train.optimizer.kind=adamw would take",  # a step of another optimizer
)  # fmt: skip
"""How sentences begin that tell of something else than the step and memory of a rank."""


def counted(plan: Plan, predicted: Predicted) -> set[str]:
    """Every byte and second that the prediction has, as it is shown."""
    away, ranks = predicted.waiting_bytes.values(), max(Counter(rank.node for rank in plan.ranks).values())
    sizes = [*predicted.memory_bytes.values(), predicted.memory_limit, *away, ranks * sum(away)]
    shown = {units.show_size(size) for size in sizes}
    return shown | {units.show_seconds(one) for one in (*predicted.terms.values(), predicted.step_seconds)}


@pytest.mark.extremes
@pytest.mark.parametrize("title", QUESTIONS)
def test_every_byte_and_second_that_is_said_of_a_plan_is_one_of_its_prediction(title: str) -> None:
    found = QUESTIONS[title].answer
    assert found.plan.predicted is not None
    known = counted(found.plan, found.plan.predicted)
    told = [said for said in found.plan.why if not said.startswith(BESIDE)]
    quantities = [one for said in told for one in QUANTITY.findall(said)]
    assert len(quantities) >= 4
    assert not set(quantities) - known


@pytest.mark.extremes
@pytest.mark.parametrize("title", QUESTIONS)
def test_the_bytes_in_the_text_sum_to_the_peak(title: str) -> None:
    plan = QUESTIONS[title].answer.plan
    assert plan.predicted is not None
    (sentence,) = [one for one in plan.why if one.startswith("Memory per ")]
    total, limit, *parts = re.findall(SIZE, sentence)
    assert (total, limit) == tuple(
        map(units.show_size, (plan.predicted.memory_bytes["peak"], plan.predicted.memory_limit))
    )
    assert sum(units.size(part) for part in parts) == pytest.approx(units.size(total), rel=0.01)


# --- what an expert would accept -------------------------------------------------------------------------------------


def test_every_answer_fits_and_runs_or_says_in_its_first_line_that_none_does() -> None:
    for title, one in QUESTIONS.items():
        found = one.answer
        if found.fits:
            plan, predicted = planned(title)
            assert plan.executable
            assert predicted.memory_bytes["peak"] <= predicted.memory_limit, title
            names = {table.device.name for table in one.machines.nodes}
            assert predicted.memory_limit <= max(LIMIT[name] for name in names) * 1e9 * 1.08, title
            assert found.request.refuses is not None
            assert found.request.refuses(plan) is None, "train runs it"
        else:
            assert str(found.refusal()).startswith("The model does not fit")


def test_tensors_and_heads_are_cut_inside_machines_only() -> None:
    for title, one in QUESTIONS.items():
        plan = one.answer.plan
        for stage in plan.stages:
            width = stage.tensor * stage.heads
            for first in range(0, len(stage.ranks), width):
                assert len({plan.ranks[rank].node for rank in stage.ranks[first : first + width]}) == 1, title


def test_no_answer_is_faster_than_its_hardware_or_absurdly_slow() -> None:
    for title, one in QUESTIONS.items():
        if one.answer.fits:
            slow = "Mbit/s" in one.cluster or "1Gbit/s" in one.cluster
            least = 0.002 if slow else 0.08
            assert least < planned(title)[1].mfu < 0.9, title


def test_seven_billion_on_eight_4090_is_cut_over_all_of_them() -> None:
    plan, predicted = planned("7B on eight RTX 4090")
    layout = plan.layout
    assert len(plan.ranks) == 8
    assert layout.pp * layout.tp * layout.sp * max(layout.shard.values()) >= 4, "one card holds no replica"
    assert said("7B on eight RTX 4090", "RTX 4090")
    assert said("7B on eight RTX 4090", "over PCI Express")
    assert 2e3 < predicted.tokens_per_second < 4e4


def test_two_laptops_agree_rarely_or_hand_on_activations_and_name_the_network() -> None:
    plan, predicted = planned("1B on two laptops")
    assert plan.replicas or plan.layout.pp == 2 or len({rank.node for rank in plan.ranks}) == 1
    assert len({rank.node for rank in plan.ranks}) == 1 or said("1B on two laptops", "1 Gbit/s between machines")
    assert predicted.tokens_per_second < 2e3


def test_four_hosts_at_100_mbit_exchange_no_gradients_at_every_step() -> None:
    title = "7B on four hosts at 100 Mbit/s"
    plan, predicted = planned(title)
    assert plan.replicas or plan.layout.dp == 1 or len({rank.node for rank in plan.ranks}) == 1
    assert said(title, "100 Mbit/s between machines") or said(title, "Rounds")
    waits = sum(predicted.terms.get(name, 0.0) for name in ("send", "pipeline", "outer"))
    assert waits == 0 or said(title, units.show_seconds(predicted.terms.get("send") or predicted.terms["outer"]))
    assert advice.compared(QUESTIONS[title]).startswith("What would be better: `--what-if links.between=10Gbit/s`")


@pytest.mark.parametrize("title", ["70B on 64 H100", "1,024 A100"])
def test_seventy_billion_are_cut_by_layers_or_states_and_use_every_device(title: str) -> None:
    plan, predicted = planned(title)
    layout = plan.layout
    assert len(plan.ranks) == QUESTIONS[title].machines.nodes[0].count * 8
    assert layout.pp * layout.tp * max(layout.shard.values()) >= 16, "70B of states need that many cards"
    assert layout.recompute != "block" or layout.pp == 1
    assert 0.3 < predicted.mfu < 0.8
    assert said(title, "over NVLink")


def test_a_mixture_says_that_its_experts_are_divided() -> None:
    plan, predicted = planned("A mixture of eight 7B experts")
    assert len(plan.ranks) == 16
    assert plan.layout.shard["optimizer"] * plan.layout.pp * plan.layout.tp * plan.layout.ep >= 8
    title = "A mixture of eight 7B experts"
    assert said(title, "States sharded") or said(title, "Experts are spread over groups")
    # No card holds more than an eighth of 46.7 billion parameters, in bf16 and fp32 copies of the optimizer's.
    assert predicted.memory_bytes["params"] <= 46.7e9 * 4 / 8
    assert predicted.memory_bytes["optimizer"] <= 46.7e9 * 12 / 8
    assert predicted.mfu > 0.15


def test_long_sequences_are_cut_over_heads_or_context_or_recomputed() -> None:
    plan, _ = planned("128 Ki tokens of context")
    assert plan.layout.sp == 8 or (plan.layout.sp >= 2 and plan.recompute != "none")
    assert plan.micro_batch == 1


def test_gpt2_on_a_3060_is_one_plain_rank() -> None:
    plan, predicted = planned("GPT-2 on one RTX 3060")
    assert (len(plan.ranks), plan.layout.cut, plan.layout.split) == (1, (), ())
    assert plan.recompute == "none"
    assert 5e3 < predicted.tokens_per_second < 6e4


def test_adapters_of_8b_fit_on_one_card_beside_frozen_weights_in_bf16() -> None:
    plan, predicted = planned("LoRA of 8B on one RTX 4090")
    assert (len(plan.ranks), plan.precision) == (1, "bf16")
    assert 14 * 2**30 < predicted.memory_bytes["frozen"] < 16 * 2**30
    assert 1e3 < predicted.tokens_per_second < 8e3


def test_adapters_of_70b_are_refused_two_cards_and_offered_more() -> None:
    found = QUESTIONS["LoRA of 70B on two RTX 3090"].answer
    assert not found.fits
    refusal = str(found.refusal())
    assert "most of it frozen" in refusal
    enough = re.search(r"devices with ([\d.]+) GiB of memory", refusal)
    assert enough is not None
    assert 24 < float(enough[1]) < 40, "people do it on two cards of 40 GB"
    assert "8 RTX 3090 in the machine instead of 2" in refusal
    assert "frozen on host" in refusal, "people do it with offload"
    assert "8 bits" not in refusal


def test_seven_billion_on_one_4090_wait_in_the_memory_of_its_machine() -> None:
    plan, predicted = planned("7B on one RTX 4090 with 128 GiB of memory")
    assert (plan.offload.optimizer, plan.offload.parameters) == ("host", "host")
    assert 80 * 2**30 < sum(predicted.waiting_bytes.values()) < 0.9 * 128 * 2**30
    assert 800 < predicted.tokens_per_second < 4000, "peers measured 2.5 to 2.8 thousand with larger batches"
    assert not said("7B on one RTX 4090 with 128 GiB of memory", "faults.memory"), "copies have no room there"


def test_a_laptop_card_of_8_gb_trains_350_million_parameters_alone() -> None:
    plan, predicted = planned("350M on a laptop with a GPU")
    assert (len(plan.ranks), plan.layout.cut, plan.precision) == (1, (), "bf16")
    assert plan.offload.optimizer == "device"
    assert 2e3 < predicted.tokens_per_second < 2e4


def test_thirteen_billion_on_sixteen_l40s_keep_their_matrices_in_a_machine() -> None:
    plan, predicted = planned("13B on two machines with L40S")
    assert len(plan.ranks) == 16
    assert plan.layout.pp > 1 or max(plan.layout.shard.values()) > 1
    assert plan.layout.tp <= 8
    assert 0.2 < predicted.mfu < 0.6


def loads_of(title: str) -> list[int]:
    """Samples times layers of each rank."""
    plan, _ = planned(title)
    layers = {rank: last - first for stage in plan.stages for rank in stage.ranks for first, last in [stage.layers]}
    return [(rank.share[1] - rank.share[0]) * layers.get(at, 1) for at, rank in enumerate(plan.ranks)]


def test_four_cards_of_three_kinds_have_work_by_their_speed() -> None:
    loads = loads_of("Four cards of three kinds")
    assert len(loads) < 4 or max(loads) > 1.5 * min(loads)


def test_servers_without_gpus_are_replicas_in_fp32() -> None:
    plan, predicted = planned("Eight servers without GPUs")
    assert plan.layout.dp >= 8
    assert plan.layout.cut == ()
    assert plan.precision == "fp32"
    assert predicted.tokens_per_second < 4e4


def test_where_nothing_fits_the_refusal_names_cards_of_the_same_kind_and_what_is_not_there() -> None:
    for title, name in (("Fine-tuning 8B on one RTX 4090", "RTX 4090"), ("13B on one A100", "A100-80GB")):
        found = QUESTIONS[title].answer
        assert not found.fits
        told = str(found.refusal()).splitlines()
        assert told[0].startswith("The model does not fit")
        (more,) = [line for line in told if f"{name} in the machine instead of 1" in line]
        assert 2 <= int(re.search(rf"(\d+) {name}", more)[1]) <= 8  # type: ignore[index]
        assert "machines of 1" not in str(found.refusal())
        (lora,) = [line for line in told if 'tune.kind="lora"' in line]
        assert re.search(r"[\d.]+ GiB of [\d.]+ GiB", lora)
        assert lora.strip().removeprefix("try: ") in PAGE
        assert told[-1].strip() == "not in Espalier: optimizer states in 8 bits"


def test_a_mixed_lab_leaves_out_the_slow_card_or_gives_it_less() -> None:
    loads = loads_of("A mixed lab")
    assert len(loads) < 4 or min(loads) < 0.7 * max(loads)
    assert said("A mixed lab", "left out") or said("A mixed lab", "Devices differ")


def test_a_graph_on_a_laptop_is_small_and_runs_in_one_process_or_few() -> None:
    plan, predicted = planned("A graph on a laptop")
    assert len(plan.ranks) * plan.ranks[0].threads <= 8
    assert predicted.step_seconds < 1
    assert predicted.memory_bytes["peak"] < 2**30 * len(plan.ranks)


def test_a_residual_network_on_two_gpus_is_data_parallel() -> None:
    plan, predicted = planned("A residual network on two GPUs")
    assert (plan.layout.dp, plan.layout.cut) == (2, ())
    assert 300 < predicted.tokens_per_second < 5000, (
        "published: about 400 images/s in fp32 and 900 in half on one RTX 3090"
    )


def test_two_old_machines_keep_their_slow_network_quiet() -> None:
    title = "Two old machines with V100"
    plan, predicted = planned(title)
    assert plan.precision != "bf16", "a V100 has none"
    assert plan.replicas or plan.layout.pp > 1 or len({rank.node for rank in plan.ranks}) == 1
    assert said(title, "over 1 Gbit/s between machines") or plan.replicas
    assert predicted.memory_limit < 16 * 2**30


def test_a_small_model_on_a_processor_stays_whole() -> None:
    plan, predicted = planned("A small model without a GPU")
    assert (plan.layout.cut, plan.layout.split) == ((), ())
    assert plan.precision in ("fp32", "bf16")
    assert predicted.memory_bytes["peak"] < 4 * 2**30
    assert len(plan.ranks) * plan.ranks[0].threads <= 16


def test_two_sites_agree_by_rounds_or_hand_on_activations() -> None:
    title = "Two sites with eight H100 each"
    plan, predicted = planned(title)
    assert len(plan.replicas) == 2 or plan.layout.pp > 1
    assert said(title, "Over the link of 1.00 Gbit/s", "agree by rounds")
    assert 5e4 < predicted.tokens_per_second < 3e5


def test_every_step_stays_where_rounds_would_gain_little_and_the_plan_says_when_they_pay() -> None:
    title = "Rounds or every step at 25 Gbit/s"
    plan, _ = planned(title)
    assert not plan.replicas
    assert said(title, "Over the link of 25.0 Gbit/s", "rounds of", "would take", "not from")


def test_eight_desktops_on_a_slow_network_all_work_and_agree_by_rounds() -> None:
    title = "Eight RTX 3060 at 100 Mbit/s"
    plan, predicted = planned(title)
    assert len(plan.replicas) == 8
    assert said(title, "what rounds keep", "host memory")
    assert 2e4 < predicted.tokens_per_second < 1e5


def test_a_mixture_of_small_experts_fits_on_one_machine() -> None:
    plan, predicted = planned("Qwen3-30B-A3B on eight H100")
    assert len(plan.ranks) == 8
    assert plan.layout.ep > 1 or plan.layout.pp * plan.layout.tp * max(plan.layout.shard.values()) == 8
    assert 0.1 < predicted.mfu < 0.5
    assert said("Qwen3-30B-A3B on eight H100", "expert")


def test_a_mixture_larger_than_its_cards_waits_in_host_memory() -> None:
    plan, predicted = planned("Mixtral on eight RTX 4090")
    assert plan.offload.optimizer == "host"
    assert 300 * 2**30 < 8 * sum(predicted.waiting_bytes.values()) < 2**40
    assert 500 < predicted.tokens_per_second < 2e4


def test_256_experts_are_spread_over_ranks_and_stages() -> None:
    plan, predicted = planned("DeepSeek-V3 on 2,048 H800")
    assert len(plan.ranks) == 2048
    assert plan.layout.ep >= 8
    assert plan.layout.pp >= 4
    assert 0.15 < predicted.mfu < 0.5, "published: 180 k GPU hours for 1 T tokens, 1.5 k tokens/s a GPU, in fp8"


@pytest.mark.parametrize("title", ["512 Ki tokens of context", "1 Mi tokens of context"])
def test_half_a_million_tokens_are_cut_over_all_cards_and_computed_by_pieces(title: str) -> None:
    plan, predicted = planned(title)
    assert plan.layout.sp * plan.layout.tp == 8
    assert plan.recompute != "none"
    assert said(title, "Logits are computed")
    assert 0.15 < predicted.mfu < 0.7


@pytest.mark.parametrize("title", ["70B on eight MI300X", "70B on eight B200"])
def test_seventy_billion_fit_on_eight_cards_of_180_gib(title: str) -> None:
    plan, predicted = planned(title)
    assert len(plan.ranks) == 8
    assert plan.layout.pp * plan.layout.tp * plan.layout.shard["optimizer"] == 8
    assert 0.25 < predicted.mfu < 0.6


def test_unlike_machines_have_layers_by_their_speed() -> None:
    title = "70B on H100 and A100"
    plan, predicted = planned(title)
    layers = {plan.ranks[stage.ranks[0]].node: stage.layers[1] - stage.layers[0] for stage in plan.stages}
    assert len(plan.ranks) == 48
    assert min(layers[node] for node in (0, 1)) > max(layers[node] for node in (2, 3, 4, 5))
    assert said(title, "Devices differ")
    assert 0.3 < predicted.mfu < 0.7


@pytest.mark.parametrize(("title", "least"), [("405B on 1,024 H100", 1024), ("405B on 10,000 H100", 8000)])
def test_405_billion_are_cut_over_machines_by_layers_or_states(title: str, least: int) -> None:
    plan, predicted = planned(title)
    assert len(plan.ranks) >= least
    assert plan.layout.pp * plan.layout.tp * plan.layout.shard["params"] >= 64
    assert 0.3 < predicted.mfu < 0.6, "published: 0.38 to 0.43 on 8,192 and 16,384 (Llama 3, table 4)"


def test_frozen_weights_of_70b_wait_in_the_memory_of_the_machine_of_one_card_of_24_gb() -> None:
    plan, predicted = planned("LoRA of 70B on one RTX 4090")
    assert (plan.offload.frozen, plan.offload.parameters) == ("host", "device")
    assert predicted.waiting_bytes["frozen"] == pytest.approx(33.9 * 2**30, rel=0.01)
    assert predicted.memory_bytes["peak"] < 24e9
    assert said("LoRA of 70B on one RTX 4090", "frozen weights (", "wait on host memory")


def test_the_planner_is_silent_of_what_the_product_does_not_have() -> None:
    """When one of these is built, the ladder of changes has to offer it instead."""
    from espalier.recipe import Adamw, Muon, Recipe

    keys = repr(Recipe.__struct_fields__) + repr(Adamw.__struct_fields__) + repr(Muon.__struct_fields__)
    assert not re.search("lora|offload|8bit", keys, re.I)
