"""The table of operations: a fast form cannot be without its reference, and is taken where it wins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import espalier.kernels
from espalier.kernels.base import OPERATIONS, Operation, operation


@pytest.fixture
def doubled() -> Operation[[Tensor, int], Tensor]:
    @operation("doubled in a test")
    def plain(x: Tensor, times: int) -> Tensor:
        """x * 2 ** times."""
        return x * 2**times

    yield plain
    del OPERATIONS["doubled in a test"]


def test_the_reference_runs_where_nothing_wins(doubled: Operation[[Tensor, int], Tensor]) -> None:
    @doubled.fast("cpu", wins=lambda x, times: x.numel() > 10)
    def long_only(x: Tensor, times: int) -> Tensor:
        return x * 2**times + 0.5  # wrong, so that one sees who ran

    @doubled.fast("cuda")
    def elsewhere(x: Tensor, times: int) -> Tensor:
        raise AssertionError("this is no GPU")

    assert doubled(torch.ones(3), 2).tolist() == [4, 4, 4]
    assert doubled(torch.ones(11), times=2)[0] == 4.5
    assert [doubled.pick(torch.ones(size), 1).name for size in (3, 11)] == ["plain", "long_only"]
    assert doubled.__doc__ == "x * 2 ** times."


def test_forms_are_asked_in_their_order(doubled: Operation[[Tensor, int], Tensor]) -> None:
    for limit in (100, 10):

        def form(x: Tensor, times: int) -> Tensor:
            return x

        form.__name__ = f"over_{limit}"
        doubled.fast("cpu", wins=lambda x, times, limit=limit: x.numel() > limit)(form)
    assert [doubled.pick(torch.ones(size), 1).name for size in (5, 50, 500)] == ["plain", "over_10", "over_100"]


def test_two_of_one_name_are_refused(doubled: Operation[[Tensor, int], Tensor]) -> None:
    with pytest.raises(AssertionError, match="doubled in a test"):
        operation("doubled in a test")(lambda x: x)
    with pytest.raises(AssertionError):
        doubled.fast("cpu")(doubled.reference.run)


def test_every_operation_of_the_package_has_a_reference_and_fast_forms() -> None:
    assert espalier.kernels.__all__
    for name, one in OPERATIONS.items():
        assert one.name == name
        assert one.reference.device == ""
        assert one.forms
        assert {form.device for form in one.forms} <= {"cpu", "cuda"}
