"""The recipe section [store]: what it may hold, what a resumed run may change of it, and what is refused by name."""

from __future__ import annotations

import os

import pytest

from espalier.recipe import Recipe, defaults, recipe_file, value_ranges
from espalier.recipe.errors import UserError
from espalier.train import run_folder as run


def recipe_of(**store) -> Recipe:
    table = {"model": {"kind": "sage"}, "data": {"path": "made"}, "graph": {"fanout": [5, 5]}, "store": store}
    return defaults.resolve(recipe_file.from_table(table))[0]


@pytest.mark.parametrize(
    ("store", "graph", "says"),
    [
        ({"memory": "0B"}, {}, "store.memory = '0B'"),
        ({"memory": "much"}, {}, "store.memory"),
        ({"disk": "some"}, {}, "store.disk"),
        ({"resample": 1.5}, {}, "store.resample = 1.5"),
        ({"path": []}, {}, "store.path = []"),
        ({"path": ["/a", "/a"]}, {}, "store.path = ['/a', '/a']"),
        ({}, {"fanout": []}, "graph.fanout = []"),
        ({}, {"task": "link"}, "graph.task = 'link'"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(store, graph, says):
    table = {"model": {"kind": "sage"}, "graph": {"fanout": [5, 5], **graph}, "store": store}
    with pytest.raises(UserError) as caught:
        value_ranges.check(recipe_file.from_table(table))
    assert says in caught.value.what
    assert caught.value.do


def test_a_language_model_has_no_store_of_features():
    with pytest.raises(UserError, match=r"\[store\] belongs to a graph model"):
        value_ranges.check(recipe_file.from_table({"model": {"depth": 2}, "store": {}}))


def test_a_language_model_may_say_where_states_of_optimizer_nodes_lie():
    value_ranges.check(recipe_file.from_table({"model": {"depth": 2}, "store": {"path": ["/a", "/b"]}}))
    with pytest.raises(UserError, match=r"\[store\] belongs to a graph model"):
        value_ranges.check(recipe_file.from_table({"model": {"depth": 2}, "store": {"path": "/a", "rows": "int8"}}))


@pytest.mark.parametrize("key", ["memory", "path", "disk"])
def test_where_rows_wait_may_change_when_a_run_is_taken_up(key):
    assert recipe_file.changed(recipe_of(), recipe_of(**{key: "3GiB"})) == []


@pytest.mark.parametrize(("key", "value"), [("rows", "int8"), ("resample", 0.5)])
def test_what_is_trained_on_may_not(key, value):
    assert recipe_file.changed(recipe_of(), recipe_of(**{key: value}))[0][0] == f"store.{key}"


def test_the_folders_of_a_run_hold_in_any_working_directory():
    several = run.located(recipe_of(path=["a", "/b"])).store
    assert several is not None
    assert several.path == (os.path.abspath("a"), "/b")
    assert run.located(recipe_of()).store == recipe_of().store
