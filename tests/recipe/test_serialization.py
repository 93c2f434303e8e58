"""Plain values as bytes: what goes in comes out with its types, all else is refused, and no bytes do anything else."""

from __future__ import annotations

import random
import tracemalloc
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from espalier.recipe import serialization
from espalier.recipe.errors import UserError
from espalier.recipe.serialization import Placeholder

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(lambda shape, dtype: torch.randn(shape).to(dtype), shapes, st.sampled_from(DTYPES))


def arrays() -> st.SearchStrategy[Any]:
    made = st.builds(
        lambda shape, kind: np.ones(shape, dtype=kind),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from("fdiB?F"),
    )
    return made | st.sampled_from([np.float64(1.5), np.int32(-3), np.bool_(True)])


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | tensors() | arrays()
    | st.sampled_from([torch.float16, torch.Size([2, 3]), Placeholder("model/weight")])
)  # fmt: skip
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False) | st.tuples(st.integers())
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner), max_leaves=12
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or repr(one) == repr(other) == "nan"


@settings(deadline=None)
@given(VALUES)
@example({"a": 2**64 - 1, "b": -(2**63), "c": 2**64, "d": -(2**63) - 1, "e": float("inf")})
@example({"step": {0: (1, [2, (3,)])}, True: (), 1.5: [], (1, "x"): {}})
def test_what_goes_in_comes_out_with_its_types(value: Any) -> None:
    assert same(serialization.loads(serialization.dumps(value)), value)


def test_a_tensor_of_one_element_or_none_comes_back_whatever_its_strides() -> None:
    empty = torch.from_numpy(np.zeros((3, 4), np.int64)[:, :0].reshape(0))
    single = torch.tensor([7]).as_strided((1,), (0,))
    for one in (empty, torch.zeros(2, 0, dtype=torch.int64), torch.empty_strided((0,), (0,)), single):
        again = serialization.loads(serialization.dumps(one))
        assert again.dtype == one.dtype
        assert torch.equal(again, one)


def test_random_states_and_states_of_optimizers_come_back() -> None:
    model = torch.nn.Linear(3, 2)
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
    for kind in kinds:
        optimizer = kind(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9) if kind is not kinds[2] else None
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict() if scheduler else None}
        assert same(serialization.loads(serialization.dumps(state)), state)
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    assert same(serialization.loads(serialization.dumps(state)), state)


def test_any_mapping_and_parameter_comes_back_plain() -> None:
    value = OrderedDict(a=torch.nn.Parameter(torch.ones(2)))
    back = serialization.loads(serialization.dumps(value))
    assert type(back) is dict
    assert same(back["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {1, 2}}, "model/a is of type set"),
        ({"a": [0, {3: Fraction(1, 2)}]}, "model/a/1/#3 is of type fractions.Fraction"),
        ((print,), "model/0 is of type builtin_function_or_method"),
        ({"x": np.array([object()])}, "model/x is of type numpy.ndarray"),
        ({Fraction(1, 2): 1}, "model is of type fractions.Fraction"),
        (["\ud800"], "model/0 cannot be encoded"),
    ],
)
def test_another_type_is_refused_and_its_place_named(value: Any, place: str) -> None:
    with pytest.raises(UserError, match=place):
        serialization.dumps(value, "model")


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UserError, match="holds itself"):
        serialization.dumps(value)


def decoded(data: bytes) -> None:
    try:
        serialization.loads(data, "a message")
    except UserError:
        return


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=200))
@example(b"\x91" * 100_000)
@example(b"\xc7\x02\x01\x91" * 5000)
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    decoded(data)


@settings(deadline=None, max_examples=300)
@given(VALUES, st.data())
def test_nor_do_bytes_that_were_good_once(value: Any, data: st.DataObject) -> None:
    good = bytearray(serialization.dumps(value))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    decoded(bytes(good[: data.draw(st.integers(0, len(good)))]))


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
        b"\xdf\xff\xff\xff\xff",  # as large a table
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\xc9\xff\xff\xff\xff\x01",  # as large a tuple
        serialization.dumps(torch.zeros(1)).replace(b"\x91\x01", b"\x91\xce\xff\xff\xff\xff"),  # as large a tensor
        b"\xdd\x00\xff\xff\xff" * 50,  # arrays in arrays
    ],
)
def test_a_length_that_lies_takes_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            serialization.loads(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
