"""Ranks that have parts of matrices compute with whole ones, each with its share of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from espalier.optim import muon
from espalier.optim.cut_matrices import MatrixCut
from espalier.recipe import Adamw, Muon
from many_ranks import ranks

ENDS = {
    "equal": ((0, 3), (3, 6), (6, 9)),
    "unequal": ((0, 2), (2, 6), (6, 9)),
    "two have the same": ((0, 4), (0, 4), (4, 9)),
}


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", ENDS)
def test_parts_of_what_is_computed_of_whole_matrices_come_back(parts: str, dim: int, count: int) -> None:
    shape = torch.Size((9, 7) if dim == 0 else (7, 9))
    matrices = torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = muon.orthogonalize(matrices, 5)

    def rank(group: Any) -> tuple[Tensor, list[int]]:
        taken: list[int] = []

        def compute(whole: Tensor) -> Tensor:
            taken.append(len(whole))
            return muon.orthogonalize(whole, 5)

        first, last = ENDS[parts][group.rank()]
        cut = MatrixCut(shape, dim, ENDS[parts], group)
        return cut.apply(matrices.narrow(dim + 1, first, last - first), compute), taken

    results = ranks(3, rank)
    for (first, last), (part, _) in zip(ENDS[parts], results, strict=True):
        torch.testing.assert_close(part, wanted.narrow(dim + 1, first, last - first), rtol=1e-12, atol=1e-12)
    shares = [taken for _, [taken] in results]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_move_as_those_of_whole_matrices(dim: int) -> None:
    """By the rate of the whole shape, whatever that of a part is."""
    shape = torch.Size((9, 6) if dim == 0 else (18, 9))
    generator = torch.Generator().manual_seed(3)
    start, *gradients = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4))

    def moved(whole: Tensor, moves: list[Tensor], cut: MatrixCut | None) -> Tensor:
        matrix = nn.Parameter(whole.clone())
        options = Muon(learning_rate=0.02, adamw=Adamw(learning_rate=1e-3))
        optimizer = muon.MuonStep([{"params": [matrix], "cut": cut}], options)
        optimizer.state[matrix]["momentum"] = torch.zeros_like(matrix)
        for gradient in moves:
            matrix.grad = gradient.clone()
            optimizer.step()
        return matrix.detach()

    def rank(group: Any) -> Tensor:
        first, last = ENDS["unequal"][group.rank()]
        parts = [whole.narrow(dim, first, last - first) for whole in (start, *gradients)]
        return moved(parts[0], parts[1:], MatrixCut(shape, dim, ENDS["unequal"], group))

    whole = moved(start, gradients, None)
    torch.testing.assert_close(torch.cat(ranks(3, rank), dim), whole, rtol=1e-12, atol=1e-12)


def test_ranks_that_share_matrices_take_as_many_at_once() -> None:
    """Also where one matrix is more than is orthogonalized at once."""
    large = torch.Size((muon.LARGEST_BATCH // 1024, 2048))
    assert [len(batch) for batch in muon.batches([large] * 10, ranks=4)] == [4, 4, 2]
    assert [len(batch) for batch in muon.batches([torch.Size((1024, 1024))] * 40, ranks=3)] == [15, 15, 10]
