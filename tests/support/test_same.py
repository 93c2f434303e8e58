from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from many_ranks import same

trees = st.recursive(
    st.integers() | st.text(max_size=3) | st.floats(allow_nan=True) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@given(trees)
def test_everything_is_the_same_as_itself(tree: object) -> None:
    same(tree, tree)
    same(tree, tree, bitwise=True)


@given(st.lists(st.integers(), min_size=1, max_size=5), st.data())
def test_any_changed_number_is_found_and_its_place_named(numbers: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(numbers) - 1))
    other = list(numbers)
    other[place] += 1
    with pytest.raises(AssertionError, match=rf"\['x'\]\[{place}\]"):
        same({"x": numbers}, {"x": other})


@dataclass
class _Point:
    where: torch.Tensor


def test_the_first_differing_element_is_named() -> None:
    left, right = torch.zeros(2, 3), torch.zeros(2, 3)
    right[1, 2] = 1
    with pytest.raises(AssertionError, match=r"\[0\]\.where\[1, 2\]: 0\.0 is not 1\.0.*1 of 6"):
        same([_Point(left)], [_Point(right)])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        ({"a": 1}, {"b": 1}),
        ([1], [1, 2]),
        (1, "1"),
        (True, 1),
        (torch.tensor([1]), torch.tensor([2])),
        (np.float32(1), np.float32(2)),
        (float("nan"), 1.0),
    ],
)
def test_what_differs_is_refused(left: object, right: object) -> None:
    with pytest.raises(AssertionError):
        same(left, right)


def test_bounds_are_relative_to_the_largest_value() -> None:
    right = torch.tensor([1000.0, 0.0])
    same(right + torch.tensor([0.0, 0.009]), right)
    with pytest.raises(AssertionError):
        same(right + torch.tensor([0.0, 0.011]), right)
    same(right + 1, right, relative=2e-3)


def test_bitwise_sees_the_sign_of_zero_and_every_last_bit() -> None:
    with pytest.raises(AssertionError):
        same(torch.tensor([0.0]), torch.tensor([-0.0]), bitwise=True)
    nan = torch.tensor([float("nan"), 1.0])
    same(nan, nan.clone(), bitwise=True)
    with pytest.raises(AssertionError):
        same(nan[1], torch.nextafter(nan[1], nan[1] + 1), bitwise=True)


def test_arrays_and_tensors_compare() -> None:
    same({"x": np.arange(3)}, {"x": torch.arange(3)})
