"""`espalier explain WORD`: every word that a plan says is explained, once, with an option that exists."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from espalier import recipe as config
from espalier.cli import main as cli
from espalier.comm.base import Traffic
from espalier.machine import cluster as clusters
from espalier.plan.base import Plan
from espalier.plan.decide import decide
from espalier.recipe import defaults, mechanism_options, recipe_file, records, sections
from espalier.train.request_from_recipe import of_recipe

ROOT = Path(__file__).parents[2]


def spellings() -> list[str]:
    return [spelling for word in records.words() for spelling in (word.name, *word.aliases)]


def test_a_spelling_means_one_thing() -> None:
    every = [records._plain(one) for one in spellings()]
    systems = [records._plain(one) for record in records.all_records() for one in (record.name, *record.aliases)]
    assert len(every) == len(set(every))
    assert not set(every) & set(systems)


def test_everything_that_can_be_pinned_is_explained() -> None:
    pinned = {field.name for field in msgspec.structs.fields(sections.Pin)}
    missing = {name for name in pinned if records.word(name) is None}
    assert not missing


def test_every_quantity_of_a_plan_is_explained() -> None:
    plan = planned()
    assert plan.predicted is not None
    names = {*plan.predicted.terms, *plan.predicted.memory_bytes} - {"peak"}
    assert {"forward", "all_reduce", "activations", "slack"} <= names
    missing = {name for name in names if records.word(name) is None}
    assert not missing


def test_every_class_of_traffic_is_explained() -> None:
    assert not {one.value for one in Traffic if records.word(one.value) is None}


def test_every_quantity_of_a_cut_graph_is_explained() -> None:
    table = {
        "model": {"kind": "sage"},
        "data": {"path": "planted:nodes=200,degree=6"},
        "graph": {"halo": {}},
        "plan": {"pin": {"ranks": 2}, "trial": False},
    }
    recipe, _ = defaults.resolve(recipe_file.from_table(table))
    plan = decide(of_recipe(recipe), clusters.loads('[[nodes]]\ndevices = 2\ndevice = "A100-80GB"\n')).taken
    assert plan.predicted is not None
    names = {*plan.predicted.terms, *plan.predicted.memory_bytes, *plan.predicted.sent_bytes} - {"peak"}
    assert {"halo", "control"} <= names
    assert not {name for name in names if records.word(name) is None}


def planned() -> Plan:
    text = '[[nodes]]\ncount = 2\ndevices = 8\ndevice = "A100-80GB"\n[links]\nbetween = "100Gbit/s"\n'
    recipe, _ = defaults.resolve(recipe_file.from_table({"model": {"shape": "llama-7b"}}))
    return decide(of_recipe(recipe), clusters.loads(text)).taken


@pytest.mark.parametrize("word", records.words(), ids=lambda word: word.name)
def test_its_option_and_its_page_are_there(word: records.Word) -> None:
    assert (ROOT / word.page).is_file()
    if not word.option:
        return
    types, place = [config.base.RecipeBase], []
    for part in word.option.split("."):
        fields = {name: kind for one in types for name, kind in mechanism_options.fields(one, place).items()}
        place.append(part)
        assert part in fields or part == "kind", word.option
        found = fields.get(part)
        types = [one for one in getattr(found, "__args__", (found,)) if hasattr(one, "__struct_fields__")]


def test_a_word_is_said_in_any_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    for spelling in ("micro_batch", "Micro-Batch", "microbatch"):
        assert cli.main(["explain", spelling]) == 0
        said = capsys.readouterr().out
        assert said.startswith("micro_batch: ")
        assert "plan.pin.micro_batch" in said
    assert cli.main(["explain", "tp", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["option"] == "plan.pin.tp"
    assert cli.main(["explain", "nonsense"]) == 2
    assert "no word of a plan" in capsys.readouterr().err
    assert cli.main(["explain", "hallo"]) == 2
    assert "try: espalier explain halo\n" in capsys.readouterr().err


def test_several_names_are_explained_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "diskgnn", "tp"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("DiskGNN: ")
    assert "\n\ntp: " in said
    assert cli.main(["explain", "diskgnn", "tp", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["diskgnn", "tp"]
    assert cli.main(["explain", "diskgnn", "nonsense"]) == 2
    assert not capsys.readouterr().out
