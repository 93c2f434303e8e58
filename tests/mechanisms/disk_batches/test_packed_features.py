"""A plan for features on disk: the levels they wait on, what packing takes, and what memory changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from espalier.cli import resolve_recipe
from espalier.cli.main import main
from espalier.cli.run_plan import with_chosen
from espalier.machine import cluster as clusters
from espalier.plan.base import Plan, dumps, loads
from espalier.plan.decide import decide
from espalier.recipe import units
from espalier.recipe.errors import UserError

RECIPE = """
[model]
kind = "sage"
width = 16
depth = 2
[graph]
fanout = [4, 4]
[data]
path = "planted:nodes=6000,degree=8,features=64,classes=4"
cache = "{folder}"
[train]
steps = 8
batch_tokens = 128
[store]
memory = "{memory}"
path = "{folder}/packed"
[plan]
trial = false
[plan.pin]
ranks = 1
"""
MACHINE = """
[[nodes]]
device = "cpu"
cores = 2
memory = "8GiB"
"""
DISK = """
[[nodes.disks]]
path = "/scratch"
read = {read}
write = {read}
iops = 5000
iops_parallel = 20000
"""


def planned(folder: Path, memory: str, disk: float = 1e9) -> Plan:
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder, memory=memory))
    cluster = clusters.loads(MACHINE + (DISK.format(read=disk) if disk else ""))
    return decide(resolve_recipe.request(resolve_recipe.resolve(folder / "recipe.toml", [])), cluster).plan


def sizes(plan: Plan, what: str) -> float:
    """Bytes before a word of the sentence about levels."""
    told = next(line for line in plan.why if line.startswith("Features ("))
    found = re.search(rf"([\d.]+ [KMG]?i?B) {what}", told)
    return units.size(found[1].replace(" ", ""), "test") if found else 0.0


def test_levels_and_their_bytes_are_said(tmp_path: Path) -> None:
    plan = planned(tmp_path, "4MiB")
    levels = sizes(plan, "in host memory") + sizes(plan, "in a cache") + sizes(plan, "packed")
    assert sizes(plan, "of disk in") == pytest.approx(levels, rel=0.02)
    assert plan.predicted
    assert 0 < plan.predicted.memory_bytes["features"] <= 4 * 2**20
    kinds = sum(size for kind, size in plan.predicted.memory_bytes.items() if kind != "peak")
    assert plan.predicted.memory_bytes["peak"] == pytest.approx(kinds)
    assert sum(plan.predicted.terms.values()) == pytest.approx(plan.predicted.step_seconds)


def test_more_memory_holds_more_rows_and_packs_fewer(tmp_path: Path) -> None:
    plans = [planned(tmp_path, memory) for memory in ("3MiB", "4MiB", "8MiB")]
    hot, packed = ([sizes(plan, what) for plan in plans] for what in ("in host memory", "packed"))
    assert hot == sorted(hot)
    assert packed == sorted(packed, reverse=True)
    assert hot[0] < hot[2]


def test_memory_for_less_than_a_batch_is_refused_with_the_least(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too small for one batch: it takes at least") as error:
        planned(tmp_path, "100KiB")
    least = re.search(r"at least ([\d,]+) bytes", error.value.what)
    assert least
    assert planned(tmp_path, f"{-(-int(least[1].replace(',', '')) // 1024)}KiB").predicted


def test_a_slow_disk_makes_steps_longer_and_one_that_nobody_knows_is_not_priced(tmp_path: Path) -> None:
    quick, slow, unknown = (planned(tmp_path, "4MiB", disk).predicted for disk in (1e10, 1e5, 0))
    assert quick
    assert slow
    assert unknown
    assert slow.step_seconds > 5 * quick.step_seconds
    assert unknown.terms["features"] == 0
    assert not any("are packed once" in line for line in planned(tmp_path, "4MiB", 0).why)


def test_what_if_there_were_more_memory_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, "4MiB")
    (tmp_path / "cluster.toml").write_text(MACHINE + DISK.format(read=1e9))
    command = ["plan", str(tmp_path / "recipe.toml"), "--cluster", str(tmp_path / "cluster.toml")]
    assert main([*command, "--what-if", "store.memory=8MiB"]) == 0
    answer, _, plain = capsys.readouterr().out.partition("store.memory = 4.00 MiB")
    assert "What if" in answer
    assert "store.memory = 8.00 MiB" in answer
    assert plain


@pytest.mark.parametrize(("nodes", "memory", "pays"), [(20000, "8MiB", True), (6000, "3MiB", False)])
def test_how_results_of_layers_lie_on_disk_is_said_with_the_bytes_of_both_forms(
    tmp_path: Path, nodes: int, memory: str, pays: bool
) -> None:
    recipe = RECIPE.replace("nodes=6000", f"nodes={nodes}").format(folder=tmp_path, memory=memory)
    (tmp_path / "recipe.toml").write_text(recipe)
    request = resolve_recipe.request(resolve_recipe.resolve(tmp_path / "recipe.toml", []))
    plan = decide(request, clusters.loads(MACHINE)).plan
    (told,) = (line for line in plan.why if "results of layer 1" in line)
    assert ("are written by ranges with the rows that each reads (condensed)" in told) == pays
    assert ("are written by node" in told) != pays
    shown = [units.size(size.replace(" ", ""), "test") for size in re.findall(r"[\d.]+ [KMG]?i?B", told)]
    condensed, plain, written = shown
    assert condensed < plain
    assert pays or condensed + 1.5 * written > plain, "rows, and which these are"
    assert "disk_batches" in request.profile.facts
    assert request.profile.facts["disk_batches"].inferred is not None
    (few,) = request.profile.facts["disk_batches"].inferred(1 << 30)
    assert not few.pays, "all of it is one range"
    assert few.plain == few.condensed


GPU = '[[nodes]]\ndevice = "A100-80GB"\ndevices = 2\nmemory = "64GiB"\n'


def on_gpus(folder: Path, store: str = "") -> Plan:
    recipe = RECIPE.replace("[plan]", f"{store}\n[plan]").replace("ranks = 1", "ranks = 2")
    (folder / "recipe.toml").write_text(recipe.format(folder=folder, memory="8MiB"))
    return decide(resolve_recipe.request(resolve_recipe.resolve(folder / "recipe.toml", [])), clusters.loads(GPU)).plan


def test_the_plan_keeps_the_most_used_rows_on_gpus_as_they_have_room_or_as_the_recipe_says(tmp_path: Path) -> None:
    free, some, none = (on_gpus(tmp_path, store) for store in ("", 'device = "64KiB"', "device = 0"))
    (told,) = (line for line in free.why if "are on each GPU too" in line)
    assert free.choices["disk_batches"].device == pytest.approx(sizes(free, "in host memory"), rel=0.01)
    assert units.show_size(free.choices["disk_batches"].device) in told
    assert some.choices["disk_batches"].device == 64 << 10
    assert "disk_batches" not in none.choices
    assert some.predicted
    assert some.predicted.memory_bytes["features"] == 64 << 10, "of the GPU: the rest is in host memory"
    assert "disk_batches" not in planned(tmp_path, "8MiB").choices
    assert any("no effect on processors" in line for line in planned(tmp_path, '8MiB"\ndevice = "1MiB').why)
    assert loads(dumps(some)).choices == some.choices
    assert with_chosen(some, None).choices == some.choices
