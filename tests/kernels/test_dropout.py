"""A nonlinearity and the dropout behind it equal the plain ones but for which values are dropped."""

from __future__ import annotations

import pytest
import torch
from awkward import pretend_threads

from espalier.kernels.dropout import KINDS, LEAST, activated, in_one_pass
from espalier.kernels.dropout_cpu import PIECE

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
ALL = pytest.mark.parametrize("kind", KINDS)


@DTYPES
@pytest.mark.parametrize("kind", ["relu", "elu"])
def test_without_dropout_it_is_the_plain_nonlinearity(kind: str, dtype: torch.dtype) -> None:
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -100.0, -1e-7], dtype=dtype)
    values = torch.cat([odd, 3 * torch.randn(1003, dtype=dtype)]).requires_grad_()
    fast, plain = in_one_pass(values, kind, 0.0), activated.reference.run(values, kind, 0.0)
    torch.testing.assert_close(fast, plain, equal_nan=True, rtol=1e-6, atol=2e-7 if dtype == torch.float32 else 1e-15)
    seed = torch.randn_like(values)
    ours, theirs = (torch.autograd.grad(one, values, seed)[0] for one in (fast, plain))
    torch.testing.assert_close(ours[:4], theirs[:4])
    torch.testing.assert_close(ours[5:], theirs[5:], rtol=1e-6, atol=1e-6)


@DTYPES
@ALL
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_what_stays_is_scaled_up_and_the_rest_has_no_gradient(kind: str, dtype: torch.dtype, share: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(2 * PIECE + 77, dtype=dtype).requires_grad_()
    whole = activated.reference.run(values, kind, 0.0)
    dropped = activated(values, kind, share)
    stays = dropped != 0
    torch.testing.assert_close(dropped[stays], whole[stays] / (1 - share), rtol=1e-5, atol=1e-6)
    expected = 1 - float(((whole != 0) & ~stays).sum()) / float((whole != 0).sum())
    assert abs(expected - (1 - share)) < 0.015
    seed = torch.randn_like(values)
    ours, theirs = torch.autograd.grad(dropped, values, seed)[0], torch.autograd.grad(whole, values, seed)[0]
    torch.testing.assert_close(ours, torch.where(stays, theirs / (1 - share), 0), rtol=1e-5, atol=1e-5)


@ALL
def test_its_gradient_is_right(kind: str) -> None:
    def seeded(values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return in_one_pass(values, kind, 0.5)

    assert torch.autograd.gradcheck(seeded, (torch.randn(50, dtype=torch.float64, requires_grad=True),))


def test_which_values_are_dropped_depends_on_the_generator_alone() -> None:
    values, found = torch.ones(3 * PIECE + 5), []
    for threads in (1, 2):
        pretend_threads(threads)
        torch.manual_seed(5)
        found.append(activated(values, "none", 0.5))
    pretend_threads(1)
    assert torch.equal(*found)
    assert not torch.equal(activated(values, "none", 0.5), found[0])


def test_neighbours_columns_and_pieces_are_dropped_independently() -> None:
    torch.manual_seed(1)
    stays = (activated(torch.ones(64 * PIECE), "none", 0.5) != 0).double()
    for apart in (1, 2, 8, 64, PIECE, 3 * PIECE):
        pairs = torch.stack([stays[:-apart], stays[apart:]])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / stays.numel() ** 0.5
    assert float(stays.view(-1, 64).mean(0).std()) < 1.5 * 0.5 / (stays.numel() / 64) ** 0.5


def test_few_values_half_precision_and_shares_of_all_are_left_to_torch() -> None:
    assert activated.pick(torch.ones(LEAST), "relu", 0.5).name == "in_one_pass"
    assert activated.pick(torch.ones(LEAST - 1), "relu", 0.5).name == "activated"
    assert activated.pick(torch.ones(LEAST, dtype=torch.bfloat16), "relu", 0.5).name == "activated"
    assert activated(torch.ones(3), "none", 1.0).tolist() == [0, 0, 0]
