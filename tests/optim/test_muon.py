from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from espalier.optim import muon
from espalier.optim.base import owned_by
from espalier.recipe import Adamw, Muon

OPTIONS = Muon(learning_rate=0.02, adamw=Adamw(learning_rate=1e-3))


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), seed=st.integers(0, 99))
def test_orthogonalized_singular_values_are_near_one(rows, columns, seed):
    matrix = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before = matrix.clone()
    values = torch.linalg.svdvals(muon.orthogonalize(matrix, 9))
    assert torch.equal(matrix, before)
    # Square Gaussian matrices have tiny singular values, which five-term polynomials lift only slowly.
    start = torch.linalg.svdvals(matrix / torch.linalg.matrix_norm(matrix, keepdim=True))
    assert values.max() < 1.3
    assert values[start > 1e-2].min() > 0.6


def test_orthogonalize_keeps_the_singular_vectors():
    u, _, vt = torch.linalg.svd(torch.randn(6, 9, dtype=torch.float64), full_matrices=False)
    matrix = u @ torch.diag(torch.linspace(0.3, 1.0, 6, dtype=torch.float64)) @ vt
    result = muon.orthogonalize(matrix[None], 5)[0]
    rotated = u.T @ result @ vt.T
    assert (rotated - torch.diag(rotated.diagonal())).abs().max() < 1e-10
    assert rotated.diagonal().min() > 0.6


def test_batched_matrices_move_as_each_would_alone():
    torch.manual_seed(0)
    matrices = torch.randn(3, 8, 5, dtype=torch.float64)
    together = muon.orthogonalize(matrices, 5)
    for index in range(3):
        torch.testing.assert_close(together[index], muon.orthogonalize(matrices[index : index + 1], 5)[0])


TABLES = frozenset({"0.weight", "3.weight"})


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 13))


def test_only_hidden_matrices_go_to_muon():
    net = model()
    state = muon.build(OPTIONS, owned_by(net), TABLES).state_dict()
    assert [key for key in state if key.endswith("/momentum")] == ["1.weight/momentum"]
    assert {key.split("/")[0] for key in state} == {name for name, _ in net.named_parameters()}


def test_training_with_muon_lowers_the_loss_and_resumes_bit_for_bit():
    def run(net, optimizer, steps):
        x = torch.arange(13)
        losses = []
        for _ in range(steps):
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(x), (x + 1) % 13)
            loss.backward()
            optimizer.step(1.0)
            losses.append(loss.item())
        return losses

    net = model()
    optimizer = muon.build(OPTIONS, owned_by(net), TABLES)
    losses = run(net, optimizer, 10)
    other = model()
    other.load_state_dict(net.state_dict())
    second = muon.build(OPTIONS, owned_by(other), TABLES)
    second.load_state_dict({key: value.clone() for key, value in optimizer.state_dict().items()})
    assert run(net, optimizer, 10) == run(other, second, 10)
    assert losses[-1] < losses[0]


SHAPES = [(6, 6), (12, 4), (4, 12), (6, 6)]
FACTORS = (1.0, 0.5, 0.25, 1.0, 0.75, 0.1)
"""Of the rate in each step, as a schedule gives them."""


def gradients() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES] for _ in FACTORS]


def moved_by_the_paper(matrix: torch.Tensor, moves: list[torch.Tensor], options: Muon) -> torch.Tensor:
    """Jordan et al. (2024), matrix by matrix: momentum of Nesterov's form, quintic steps, sqrt(rows/columns)."""
    rows, columns = matrix.shape
    velocity = torch.zeros_like(matrix)
    for gradient, factor in zip(moves, FACTORS, strict=True):
        rate = factor * options.learning_rate
        velocity = options.momentum * velocity + (1 - options.momentum) * gradient
        ahead = options.momentum * velocity + (1 - options.momentum) * gradient
        update = ahead / (ahead.square().sum().sqrt() + 1e-7)
        for _ in range(options.iterations):
            square = update @ update.T
            update = 3.4445 * update - 4.7750 * square @ update + 2.0315 * square @ square @ update
        matrix = matrix - rate * options.weight_decay * matrix
        matrix = matrix - rate * max(1, rows / columns) ** 0.5 * update
    return matrix


def starts() -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]


def moved_by(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], factors: tuple[float, ...] = FACTORS
) -> list[torch.Tensor]:
    matrices = [nn.Parameter(start) for start in starts()]
    optimizer = make(matrices)
    for moves, factor in zip(gradients(), factors, strict=True):
        for matrix, gradient in zip(matrices, moves, strict=True):
            matrix.grad = gradient
        optimizer.param_groups[0]["lr"] = factor * OPTIONS.learning_rate
        optimizer.step()
    return [matrix.detach() for matrix in matrices]


def ours(matrices: list[nn.Parameter], options: Muon = OPTIONS) -> torch.optim.Optimizer:
    optimizer = muon.MuonStep(matrices, options)
    for matrix in matrices:
        optimizer.state[matrix]["momentum"] = torch.zeros_like(matrix)
    return optimizer


@pytest.mark.parametrize("iterations", [5, 3])
def test_matrices_move_as_the_paper_says(iterations: int):
    options = msgspec.structs.replace(OPTIONS, iterations=iterations)
    ends = moved_by(lambda matrices: ours(matrices, options))
    for index, (start, end) in enumerate(zip(starts(), ends, strict=True)):
        expected = moved_by_the_paper(start, [moves[index] for moves in gradients()], options)
        torch.testing.assert_close(end, expected, rtol=1e-9, atol=1e-9)


def test_matrices_move_as_by_torchs_muon():
    """torch.optim.Muon orthogonalizes in bfloat16, so the ways are equal to within its rounding."""
    options = {"momentum": OPTIONS.momentum, "weight_decay": OPTIONS.weight_decay}
    factors = (1.0,) * len(FACTORS)
    torchs = moved_by(lambda matrices: torch.optim.Muon(matrices, **options), factors)
    for end, other, start in zip(moved_by(ours, factors), torchs, starts(), strict=True):
        assert (end - other).norm() < 0.02 * (other - start).norm()


@pytest.mark.parametrize("shape", [(48, 8), (8, 48), (16, 16)])
def test_products_are_those_of_the_smaller_side(shape: tuple[int, int]):
    """An iteration multiplies X Xᵀ, its square, and the polynomial with X, where X has no more rows than columns."""
    small, large = sorted(shape)
    with FlopCounterMode(display=False) as counter:
        muon.orthogonalize(torch.randn(3, *shape), 4)
    assert counter.get_total_flops() == 3 * 4 * 2 * small * small * (large + small + large)
