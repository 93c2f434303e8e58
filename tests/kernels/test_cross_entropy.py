"""The cross entropy of chosen rows equals PyTorch's, gradients too."""

from __future__ import annotations

import pytest
import torch
from awkward import pretend_threads
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.kernels.cross_entropy import LEAST, cross_entropy, row_by_row


@settings(max_examples=40)
@given(
    st.sampled_from([1, 3, 64, 501]),
    st.sampled_from([1, 2, 7, 10, 16, 17, 40]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_it_equals_the_plain_one_with_gradients(rows: int, classes: int, some: bool, dtype: torch.dtype) -> None:
    logits = (20 * torch.randn(rows, classes, dtype=dtype)).requires_grad_()
    chosen = torch.randperm(rows)[: rows // 2] if some else None
    labels = torch.randint(-1, classes, (rows // 2 if some else rows,))
    fast, plain = row_by_row(logits, labels, chosen), cross_entropy.reference.run(logits, labels, chosen)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(fast, plain, **close)
    ours, theirs = (torch.autograd.grad(3 * one, logits)[0] for one in (fast, plain))
    torch.testing.assert_close(ours, theirs, **close)


def test_its_gradient_is_right() -> None:
    logits = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    labels, chosen = torch.tensor([4, -1, 0, 2]), torch.tensor([8, 0, 3, 1])
    assert torch.autograd.gradcheck(lambda one: row_by_row(one, labels, chosen), (logits,))


def test_the_number_of_threads_changes_no_bit() -> None:
    logits, labels, found = torch.randn(3000, 10, requires_grad=True), torch.randint(0, 10, (3000,)), []
    for threads in (1, 2):
        pretend_threads(threads)
        total = row_by_row(logits, labels)
        found.append([total, torch.autograd.grad(total, logits)[0]])
    pretend_threads(1)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("label", [3, 2**40])
def test_a_label_beyond_the_classes_is_refused(label: int) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        row_by_row(torch.zeros(2, 3), torch.tensor([0, label]))


def test_rows_that_nobody_knows_the_answer_of_count_nothing() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    total = row_by_row(logits, torch.full((4,), -1))
    total.backward()
    assert total.item() == 0
    assert torch.equal(logits.grad, torch.zeros(4, 3))


def test_few_logits_and_other_types_are_left_to_torch() -> None:
    labels = torch.zeros(LEAST // 8, dtype=torch.int64)
    picked = [
        cross_entropy.pick(torch.zeros(LEAST // 8, wide, dtype=kind), labels).name
        for wide, kind in ((8, torch.float32), (8, torch.float64), (7, torch.float32), (8, torch.bfloat16))
    ]
    assert picked == ["row_by_row", "row_by_row", "cross_entropy", "cross_entropy"]
