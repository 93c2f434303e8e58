"""Tables that mechanisms bring: read by their rows, imported where a recipe has them, refused without their rows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args, get_type_hints

import pytest

from espalier.recipe import defaults, mechanism_options, recipe_errors, recipe_file
from espalier.recipe.errors import UserError
from espalier.recipe.sections import RecipeBase

TABLES: dict[str, dict[str, Any]] = {
    "graph.halo": {"bits": 4},
    "store": {"rows": "int8"},
    "quant": {"kind": "a2q"},
    "sync": {"kind": "eager"},
}


def table_of(name: str) -> dict[str, Any]:
    section, _, key = name.rpartition(".")
    options = {section: {key: TABLES[name]}} if section else {name: TABLES[name]}
    fanout = {"fanout": [2, 2]} if name == "store" else {}
    return {"model": {"kind": "gcn"}, "data": {"path": "x"}, "graph": fanout, **options}


def test_every_row_is_tried() -> None:
    assert TABLES.keys() == mechanism_options.TABLE.keys()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_by_its_row_and_written_as_it_was_read(name: str) -> None:
    recipe = defaults.resolve(recipe_file.from_table(table_of(name)))[0]
    options = mechanism_options.get(recipe, name)
    assert isinstance(options, mechanism_options.TABLE[name].options)
    assert recipe_file.from_table(recipe_file.to_table(recipe)) == recipe
    assert mechanism_options.to_builtins(recipe).keys() >= {name.partition(".")[0]}


@pytest.mark.parametrize("name", TABLES)
def test_a_mechanism_without_its_row_has_no_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(mechanism_options.TABLE, name)
    option = "kind" if "kind" in TABLES[name] else next(iter(TABLES[name]))
    with pytest.raises(UserError, match=name) as refused:
        recipe_file.from_table(table_of(name))
    assert option in refused.value.what or name == "quant"
    assert not [key for key in recipe_errors.known_keys() if key.startswith("quant.") and name == "quant"]


def test_the_core_reads_the_alternatives_that_the_row_leaves_to_it() -> None:
    core = get_args(get_type_hints(RecipeBase)["sync"])
    assert tuple(option.__struct_config__.tag for option in core) == mechanism_options.TABLE["sync"].core


def test_a_user_has_no_table_of_mechanisms() -> None:
    with pytest.raises(UserError, match="unknown key mechanisms"):
        recipe_file.from_table({"mechanisms": {"quant": {"kind": "a2q"}}})


def test_a_recipe_imports_options_of_the_mechanisms_that_it_names() -> None:
    script = """
import sys
from espalier.recipe import defaults, recipe_file
recipe = defaults.resolve(recipe_file.from_table({"data": {"path": "x"}}))[0]
assert recipe_file.from_table(recipe_file.to_table(recipe)) == recipe
mechanisms = [name for name in sys.modules if name.startswith("espalier.mechanisms")]
assert not mechanisms, mechanisms
recipe_file.from_table({"model": {"kind": "gcn"}, "quant": {"kind": "a2q"}})
options = [name for name in sys.modules if name.endswith(".options")]
assert options == ["espalier.mechanisms.few_bits.options"], options
assert not {"torch", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
