"""Refusals try what an expert tries: what is offered was planned, is needed, and is as mild as it may be."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from espalier.cli import resolve_recipe
from espalier.machine import cluster as clusters
from espalier.machine.cluster import Cluster
from espalier.plan import refusals, search
from espalier.plan.ask import PlanDecision
from espalier.plan.axes import offload_tiers
from espalier.plan.decide import decide
from espalier.plan.refusals import Change
from espalier.plan.request import Request
from espalier.recipe.errors import UserError

SEVEN = '[model]\nshape = "llama-7b"\n[train]\nsequence = 2048\nbatch_tokens = {}\noptimizer = {{ kind = "{}" }}\n'
CARD = '[[nodes]]\ndevice = "RTX 4090"\n'
ROOMY = CARD + 'memory = "128GiB"\n'


def decided(folder: Path, recipe: str, cluster: str) -> PlanDecision:
    (folder / "recipe.toml").write_text(recipe)
    resolved = resolve_recipe.resolve(folder / "recipe.toml", [])
    return decide(resolve_recipe.request(resolved), clusters.loads(cluster))


def offers(decision: PlanDecision) -> list[str]:
    """What would help, line by line."""
    assert not decision.fits
    return [line.strip() for line in decision.refusal().do.splitlines()]


def test_seven_billion_on_one_home_card_wait_in_host_memory(tmp_path: Path) -> None:
    plan = decided(tmp_path, SEVEN.format(16384, "adamw"), ROOMY).taken
    assert plan.precision == "bf16"
    assert (plan.offload.optimizer, plan.offload.parameters) == ("host", "host")
    assert plan.predicted is not None
    assert plan.predicted.memory_bytes["peak"] <= plan.predicted.memory_limit
    assert sum(plan.predicted.waiting_bytes.values()) <= 0.9 * 128 * 2**30
    assert plan.predicted.tokens_per_second > 1000
    waiting = plan.predicted.waiting_bytes
    assert waiting["params"] == waiting["grads"] == waiting["optimizer"] / 2, "a window of layers is in fp32"
    assert not any("faults.memory" in sentence for sentence in plan.why), "copies have no room there"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cluster", [ROOMY, CARD])
def test_what_is_offered_together_fits_and_each_part_of_it_is_needed(tmp_path: Path, cluster: str) -> None:
    line = offers(decided(tmp_path, SEVEN.format(65536, "muon"), cluster))[0]
    batch = re.match(r"(?:train\.batch_tokens=(\d+) and )?train\.optimizer\.kind=adamw", line)
    assert batch is not None, line
    roomy = cluster == ROOMY  # else nobody says that activations would not have room as well
    assert ("4 times as many steps" in line, 'plan.pin.offload="host"' in line) == (roomy, not roomy)
    pinned = "" if roomy else '[plan.pin]\noffload = "host"\n'
    tokens = int(batch[1] or 65536)
    assert decided(tmp_path, SEVEN.format(tokens, "adamw") + pinned, cluster).fits
    for other in (SEVEN.format(tokens, "muon"), SEVEN.format((2 if roomy else 8) * tokens, "adamw")):
        assert not decided(tmp_path, other + pinned, cluster).fits


def test_the_closest_plan_is_in_the_precision_that_people_would_use(tmp_path: Path) -> None:
    decision = decided(tmp_path, SEVEN.format(65536, "muon"), CARD)
    assert not decision.fits
    assert decision.request.precision == decision.plan.precision == "bf16"
    old = decided(tmp_path, SEVEN.format(65536, "muon"), CARD.replace("RTX 4090", "V100-16GB"))
    assert old.plan.precision == "fp16"


def test_an_offer_of_another_optimizer_asks_what_runs_with_that_one(tmp_path: Path) -> None:
    """Muon and offloaded parameters are refused together, AdamW and these are not."""
    request = decided(tmp_path, SEVEN.format(16384, "muon"), ROOMY).request
    cluster = clusters.loads(ROOMY)
    assert not refusals.planned(request, cluster)
    changes = [change for change in refusals._held_less(request, cluster) if change.key == refusals.OPTIMIZER]
    assert refusals.planned(changes[0].apply(request), cluster)


class Counted:
    """Plans that fit where `enough` says so. Has state: how many were asked."""

    def __init__(self, enough: Any) -> None:
        self.enough, self.asked = enough, 0

    def __call__(self, request: Request, cluster: Cluster) -> str:
        self.asked += 1
        return "1 s" if self.enough(set(request.profile.remarks)) else ""


def change(key: str, strength: int) -> Change:
    """One that leaves its mark, and those of all that are milder."""

    def apply(request: Request) -> Request:
        marks = (f"{key}{milder}" for milder in range(1, strength + 1))
        return replace(request, profile=replace(request.profile, remarks=(*request.profile.remarks, *marks)))

    return Change(key, f"{key}={strength}", apply, f"means {key}")


def grouped() -> dict[str, list[Change]]:
    return {"a": [change("a", n) for n in (1, 2, 3)], "b": [change("b", 1)], "c": [change("c", n) for n in (1, 2)]}


@pytest.mark.parametrize(
    ("needed", "line"),
    [
        ({"b1", "a2"}, ["a=2 and b=1: means a; means b (1 s)"]),
        ({"b1", "c1"}, ["b=1 and c=1: means b; means c (1 s)"]),
        ({"a1", "b1", "c2"}, ["a=1 and b=1 and c=2: means a; means b; means c (1 s)"]),
        ({"d1"}, []),
    ],
)
def test_the_fewest_and_mildest_changes_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, needed: set[str], line: list[str]
) -> None:
    planned = Counted(lambda marks: needed <= marks)
    monkeypatch.setattr(refusals, "planned", planned)
    request = decided(tmp_path, SEVEN.format(16384, "adamw"), ROOMY).request
    assert refusals._together(request, clusters.loads(ROOMY), grouped()) == line
    assert planned.asked <= 12


def test_a_kind_of_change_that_does_not_help_is_planned_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    decision = decided(tmp_path, SEVEN.format(65536, "muon"), ROOMY)
    planned = Counted(lambda marks: False)
    monkeypatch.setattr(refusals, "planned", planned)
    monkeypatch.setattr(refusals, "_more_devices", lambda request, cluster: "")
    monkeypatch.setattr(refusals, "_adapters", lambda request, cluster: iter(()))
    nearest = search.search(decision.request, clusters.loads(ROOMY)).closest
    assert nearest is not None
    refusals.cures(decision.request, clusters.loads(ROOMY), nearest)
    keys = {change.key for change in refusals._held_less(decision.request, clusters.loads(ROOMY))}
    assert planned.asked <= 2 * len(keys)


def test_adapters_are_offered_shorter_sequences_and_the_devices_that_shards_of_frozen_weights_fit_on(
    tmp_path: Path,
) -> None:
    recipe = '[model]\nshape = "{}"\n[tune]\nkind = "lora"\nfrozen = "int4"\n'
    cards = CARD.replace("4090", "3090") + "devices = {}\n"
    (line,) = [
        line for line in offers(decided(tmp_path, recipe.format("llama-70b"), cards.format(2))) if "instead" in line
    ]
    assert line.startswith("4 RTX 3090 in the machine instead of 2")
    assert decided(tmp_path, recipe.format("llama-70b"), cards.format(4)).fits
    offered = offers(decided(tmp_path, recipe.format("llama3-70b"), cards.format(4)))
    assert [line.partition(" ")[0].rstrip(":") for line in offered[:2]] == [
        'plan.pin.offload="host"',
        "train.sequence=1024",
    ]


ADAPTERS = '[model]\nshape = "{}"\n[tune]\nkind = "lora"\nfrozen = "{}"\n'


@pytest.mark.parametrize(
    ("shape", "stored", "card", "devices"),
    [
        ("llama3-70b", "int4", "RTX 4090", 1),
        ("llama3-70b", "int4", "RTX 3090", 2),
        ("llama3-8b", "bf16", "RTX 4070", 1),
    ],
)
def test_frozen_weights_that_do_not_fit_wait_in_host_memory(
    tmp_path: Path, shape: str, stored: str, card: str, devices: int
) -> None:
    cluster = f'[[nodes]]\ndevice = "{card}"\ndevices = {devices}\nmemory = "128GiB"\n'
    plan = decided(tmp_path, ADAPTERS.format(shape, stored), cluster).taken
    predicted = plan.predicted
    assert predicted is not None
    assert (plan.offload.frozen, plan.offload.parameters) == ("host", "device")
    assert predicted.memory_bytes["peak"] <= predicted.memory_limit
    shared = plan.layout.shard.get("params", 1)
    of_blocks = {"llama3-70b": 80 * 855_638_016 * (0.5 + 2 / 64), "llama3-8b": 32 * 218_103_808 * 2}[shape]
    assert predicted.waiting_bytes["frozen"] * shared == pytest.approx(of_blocks, rel=1e-3)
    assert 0 < predicted.terms["offload"] < 0.01 * predicted.step_seconds, "the link is hidden behind products"
    assert any("frozen weights (" in sentence and "wait on host memory" in sentence for sentence in plan.why)


def test_frozen_weights_that_have_no_room_in_host_memory_are_refused(tmp_path: Path) -> None:
    """Ranks of a machine read all weights before each keeps its share, so two need them twice."""
    for devices, memory, ranks in ((1, 48, 1), (1, 40, 0), (2, 90, 2), (2, 80, 1)):
        cluster = f'[[nodes]]\ndevice = "RTX 3090"\ndevices = {devices}\nmemory = "{memory}GiB"\n'
        decision = decided(tmp_path, ADAPTERS.format("llama3-70b", "int4"), cluster)
        assert (len(decision.taken.ranks) if decision.fits else 0) == ranks, (devices, memory)
    (line,) = [
        line for line in offers(decided(tmp_path, ADAPTERS.format("llama3-70b", "int4"), CARD)) if "host" in line
    ]
    assert re.match(r'plan\.pin\.offload="host": if the machines have the memory .* frozen on host: 3\d\.\d GiB', line)


def test_a_step_waits_for_frozen_weights_that_products_do_not_hide() -> None:
    speed = offload_tiers.TierRate(1e9, 1e9, 1e12)
    away = {"frozen": 8e9}
    hiding = partial(offload_tiers.HidingWork, 0.0, layers=4)
    assert offload_tiers.seconds(away, speed, hiding(100.0, 100.0)) == 2.0, "the first block"
    assert offload_tiers.seconds(away, speed, hiding(5.0, 100.0)) == 3.0
    assert offload_tiers.seconds(away, speed, hiding(100.0, 4.0)) == 4.0, "the last block stays for backward"
    assert offload_tiers.seconds(away, speed, hiding(10.0, 10.0, rounds=3)) == 14.0 + 8.0


def test_context_follows_the_sequence_of_a_shape_and_is_named_where_it_is_given(tmp_path: Path) -> None:
    long = SEVEN.format(65536, "adamw").replace("2048", "8192")
    (tmp_path / "recipe.toml").write_text(long)
    resolved = resolve_recipe.resolve(tmp_path / "recipe.toml", [])
    assert resolved.recipe.model.context == 8192  # type: ignore[attr-defined]
    (reason,) = [derivation.reason for derivation in resolved.derivations if derivation.key == "model.context"]
    assert "rotary" in reason
    (tmp_path / "recipe.toml").write_text(long.replace("[train]", "context = 4096\n[train]"))
    with pytest.raises(UserError, match=r"model\.context = 8192"):
        resolve_recipe.resolve(tmp_path / "recipe.toml", [])
