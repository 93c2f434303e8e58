"""Targets: what labels look like, what they are asked to be, and what is refused by its value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from espalier.graph.data import targets
from espalier.graph.data.graph import Graph, targeted
from espalier.graph.data.targets import Scale, read
from espalier.recipe.errors import UserError

NONE = np.nan


@pytest.mark.parametrize(
    ("values", "kind", "labels"),
    [
        (np.array([2, 0, -1]), "classes", [2, 0, -1]),
        (np.array([2.0, 0, NONE]), "classes", [2, 0, -1]),
        (np.array([[2], [0]]), "classes", [2, 0]),
        (np.array([[2.0], [3]]), "classes", [2, 3]),
        (np.array([True, False]), "classes", [1, 0]),
        (np.array([3, 200], np.uint8), "classes", [3, 200]),
        (np.array(["b", "", "a", "-1", None], object), "classes", [1, -1, 0, -1, -1]),
        (np.array([b"b", b"a"]), "classes", [1, 0]),
        (np.array([[0, 1], [-1, 1]]), "tasks", [[0, 1], [NONE, 1]]),
        (np.array([[0.0, 1], [NONE, 1]]), "tasks", [[0, 1], [NONE, 1]]),
        (np.array([[0.0], [NONE]]), "tasks", [[0], [NONE]]),
        (np.array([[0.25, 1], [0.5, 0]]), "tasks", [[0.25, 1], [0.5, 0]]),
        (np.array([0.25, -3.5, NONE]), "values", [[0.25], [-3.5], [NONE]]),
        (np.array([[0.25], [0.5]]), "values", [[0.25], [0.5]]),
        (np.array([[2.0, 7], [NONE, 3]]), "values", [[2, 7], [NONE, 3]]),
        (np.array([1e17, 3]), "values", [[1e17], [3]]),
        (np.array(["-1", "2.50", "nan", None], object), "values", [[-1], [2.5], [NONE], [NONE]]),
        (torch.tensor([1.5, 2.5], dtype=torch.bfloat16), "values", [[1.5], [2.5]]),
    ],
)
def test_labels_are_what_they_look_like(values, kind, labels):
    found = read(values, "y")
    assert found.kind == kind
    np.testing.assert_array_equal(found.labels, labels)
    assert found.labels.dtype == {"classes": np.int64, "tasks": np.float32, "values": np.float64}[kind]
    again = read(values, "y", kind)
    np.testing.assert_array_equal(again.labels, found.labels)


@pytest.mark.parametrize(
    ("values", "kind", "labels"),
    [
        (np.array([-5, -1, 7]), "values", [[-5], [-1], [7]]),
        (np.array([10**12, 0]), "values", [[10**12], [0]]),
        (np.array(["3", "-2", ""]), "values", [[3], [-2], [NONE]]),
        (np.array([[1, 5], [2, -1]]), "values", [[1, 5], [2, -1]]),
        (np.array([[0.0, 1], [0.5, 0]]), "values", [[0, 1], [0.5, 0]]),
        (np.array([0, 1, -1]), "tasks", [[0], [1], [NONE]]),
        (np.array([0, 0.5, NONE]), "tasks", [[0], [0.5], [NONE]]),
        (np.array([[0.0], [1]]), "classes", [0, 1]),
    ],
)
def test_labels_are_what_is_asked_for(values, kind, labels):
    found = read(values, "y", kind)
    assert found.kind == kind
    np.testing.assert_array_equal(found.labels, labels)


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        (np.array([0, -7]), None, r'a label is -7(.|\n)*-1 is none(.|\n)*graph.target = "values"'),
        (np.array(["0", "-7"]), None, "a label is -7"),
        (np.array([0.5, np.inf]), None, "a label is inf"),
        (np.array([0.5, -np.inf]), "values", "a label is -inf"),
        (np.array([1e200, 1.5]), None, "a label is 1e\\+200"),
        (np.array([0, 0.5]), "classes", r"a label is 0.5, which is no class"),
        (np.zeros((2, 3)), "classes", "matrix of 3 columns"),
        (np.array([0, 2]), "tasks", "a label is 2, which is no answer"),
        (np.array(["0.5", "x\n"]), "values", r"a label is 'x', which is no number"),
        (np.array([["a", "b"]]), None, "2 columns of words"),
        (np.array([[1, 5]]), None, r'matrix of 2 columns that holds 5(.|\n)*graph.target = "values"'),
        (np.zeros((2, 2, 2)), None, r"shape \[2, 2, 2\]"),
        (np.array(["2020-01-01"], "datetime64[D]"), None, r"datetime64\[D\], not numbers or words"),
    ],
)
def test_a_value_that_does_not_fit_is_named(values, kind, says):
    with pytest.raises(UserError, match=says):
        read(values, "y", kind)


def test_what_may_not_be_meant_is_said():
    assert read(np.array([0.5, 2]), "y").notes == ("targets: one column of values, a regression",)
    assert read(np.full((2, 3), 2.5), "y").notes == ("targets: 3 columns of values, a regression",)
    assert "probabilities" in read(np.full((2, 3), 0.5), "y").notes[0]
    counts = np.random.default_rng(0).integers(0, 5000, 300)
    (note,) = read(counts, "y").notes
    assert note.startswith(f"targets: 300 whole numbers, taken as {len(set(counts.tolist()))} classes")
    assert 'graph.target = "values"' in note
    assert read(counts.astype(float).astype(str), "y").notes == (note,)
    assert read(counts % 7, "y").notes == ()


FINITE = st.floats(-1e6, 1e6).map(lambda value: round(value, 6))


@settings(max_examples=40, deadline=None)
@given(arrays.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 3)), elements=FINITE | st.just(NONE)))
def test_values_are_kept_to_the_bit_and_standardised_back(values):
    found = read(values, "y", "values")
    np.testing.assert_array_equal(found.labels, values)
    scale = Scale.of(values, np.arange(len(values)))
    back = scale.restored(scale.standardised(values))
    np.testing.assert_allclose(back, values, rtol=1e-9, atol=1e-9 * max(1.0, np.nanmax(np.abs(values), initial=0)))
    again = Scale.from_table(scale.table())
    assert (again.mean.tolist(), again.deviation.tolist()) == (scale.mean.tolist(), scale.deviation.tolist())


@settings(max_examples=40, deadline=None)
@given(arrays.arrays(np.float64, st.integers(2, 12), elements=FINITE), st.integers(0, 2**31))
def test_a_scale_does_not_depend_on_the_order_and_follows_factors_of_two(values, seed):
    ids, matrix = np.arange(len(values)), values[:, None]
    scale = Scale.of(matrix, ids)
    other = Scale.of(matrix, np.random.default_rng(seed).permutation(ids))
    assert (scale.mean, scale.deviation) == (other.mean, other.deviation)
    np.testing.assert_array_equal(scale.standardised(matrix), Scale.of(8 * matrix, ids).standardised(8 * matrix))
    assert scale.deviation[0] == pytest.approx(np.std(values) or 1.0, rel=1e-6) or np.std(values) < 1e-9


def test_constant_columns_and_columns_without_values_have_the_deviation_one():
    scale = Scale.of(np.array([[0.1, NONE], [0.1, NONE], [0.1, 3.0]]), np.array([0, 1]))
    assert (scale.mean.tolist(), scale.deviation.tolist()) == ([0.1, 0.0], [1.0, 1.0])


def graph_of(labels, **known):
    return Graph.from_edges([0, 1], [1, 2], features=np.ones((3, 1)), labels=labels, **known)


def test_labels_of_sources_that_number_them_become_what_is_asked_for():
    graph = graph_of(np.array([4, -1, 2]), identity="known")
    asked = targeted(graph, "values")
    np.testing.assert_array_equal(asked.labels, [[4], [NONE], [2]])
    assert (asked.kind, asked.outputs) == ("values", 1)
    assert asked.fingerprint() != graph.fingerprint()
    assert targeted(graph, "classes") is graph
    named = graph_of(np.array([1, 0, -1]), classes=("10", "20"))
    np.testing.assert_array_equal(targeted(named, "values").labels, [[20], [10], [NONE]])
    with pytest.raises(UserError, match="'ten', which is no number"):
        targeted(graph_of(np.array([0, 0, 0]), classes=("ten",)), "values")


def test_graphs_with_rows_of_different_lengths_and_labels_of_nodes_are_named():
    rows = [torch.zeros(1, 19), torch.zeros(1, 19), torch.zeros(4)]
    with pytest.raises(UserError, match=r"item 2 has 4 labels, and item 0 has 19"):
        targets.of_graphs(rows, [5, 6, 7], "list")
    assert targets.of_graphs(rows[:2], [5, 6], "list").shape == (2, 19)
    assert targets.of_graphs([1.5, 2.5], [1, 1], "list").tolist() == [[1.5], [2.5]]
    with pytest.raises(UserError, match=r"item 0 has 4 labels, one for each node"):
        targets.of_graphs([torch.zeros(4), torch.zeros(4)], [4, 4], "list")
