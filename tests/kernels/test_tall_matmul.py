"""The product of a tall matrix equals the plain one in values and gradients, to the bit whatever the threads."""

from __future__ import annotations

import pytest
import torch
from awkward import pretend_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from espalier.kernels.tall_matmul import LEAST, in_blocks, tall_product

SIZES = st.sampled_from([1, 2, 5, 6, 7, 8, 15, 16, 17, 33, 64, 70, 130])


def operands(rows: int, inputs: int, outputs: int, start: str, dtype: torch.dtype) -> list[Tensor | None]:
    shapes = [(rows, inputs), (outputs, inputs), {"none": None, "row": (outputs,), "rows": (rows, outputs)}[start]]
    return [None if shape is None else torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@settings(max_examples=60)
@given(
    st.sampled_from([1, 5, 6, 13, 96, 97, 1601]),
    SIZES,
    SIZES,
    st.sampled_from(["none", "row", "rows"]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_product_in_blocks_equals_the_plain_one_with_gradients(
    rows: int, inputs: int, outputs: int, start: str, dtype: torch.dtype
) -> None:
    given_ = operands(rows, inputs, outputs, start, dtype)
    found, plain = in_blocks(*given_), tall_product.reference.run(*given_)
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(found, plain, **close)
    seed, asked = torch.randn_like(plain), [one for one in given_ if one is not None]
    ours, theirs = (torch.autograd.grad(one, asked, seed) for one in (found, plain))
    close = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else close
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("start", ["none", "row", "rows"])
def test_its_gradients_are_right(start: str) -> None:
    given_ = operands(14, 3, 9, start, torch.float64)
    assert torch.autograd.gradcheck(in_blocks, given_[: 2 if start == "none" else 3])


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight, start = operands(8, 3, 4, "rows", torch.float32)
    in_blocks(x.detach(), weight.detach(), start).sum().backward()
    assert (x.grad, weight.grad) == (None, None)
    assert torch.equal(start.grad, torch.ones(8, 4))


def test_the_number_of_threads_changes_no_bit() -> None:
    given_, found = operands(1000, 33, 20, "row", torch.float32), []
    for threads in (1, 2):
        pretend_threads(threads)
        result = in_blocks(*given_)
        found.append([result, *torch.autograd.grad(result.sin().sum(), given_)])
    pretend_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_few_rows_large_maps_and_other_types_are_left_to_torch() -> None:
    def picked(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> str:
        return tall_product.pick(*operands(rows, inputs, 64, "row", dtype)).name

    assert picked(LEAST, 64) == picked(LEAST, 64, torch.float64) == "in_blocks"
    assert {picked(LEAST - 1, 64), picked(LEAST, 2048), picked(LEAST, 64, torch.bfloat16)} == {"tall_product"}
    with torch.autocast("cpu", torch.bfloat16):
        assert picked(LEAST, 64) == "tall_product"
