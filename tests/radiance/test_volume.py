"""Rays through grids: every fast form equals its plain one, PyTorch's own, and finite differences."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from espalier.kernels.ragged import Ragged, offsets_of
from espalier.radiance import volume_rendering as volume
from espalier.radiance.volume_rendering import March, SceneBox, frame_of


def rays(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    origins = 3 * F.normalize(torch.randn(count, 3, generator=drawn), dim=1)
    targets = 1.2 * torch.rand(count, 3, generator=drawn) - 0.6
    return origins, F.normalize(targets - origins, dim=1)


def march(step: float = 0.05, share: float = 0.5, **box: float) -> March:
    low, high = torch.tensor([-1.0, -0.8, -0.6]), torch.tensor([0.9, 0.7, 1.0])
    mask = torch.rand(9, 7, 11, generator=torch.Generator().manual_seed(3)) < share
    return March(SceneBox(low, high, **box).packed, step, mask, frame_of(low, high, mask.shape))


def alphas(seed: int, *lengths: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.rand(sum(lengths), generator=drawn, dtype=dtype), offsets_of(torch.tensor(lengths))


@pytest.mark.parametrize("box", [{}, {"near": 2.5, "far": 3.1}])
def test_rays_are_sampled_alike_by_both_forms(box: dict[str, float]) -> None:
    origins, directions = rays(300)
    origins[0], directions[0] = torch.tensor([0.1, 0.2, -4.0]), torch.tensor([0.0, 0.0, 1.0])  # along an axis
    origins[1], directions[1] = torch.tensor([5.0, 0.2, -4.0]), torch.tensor([0.0, 0.0, 1.0])  # beside the box
    fast, plain = (
        form(origins, directions, march(**box)) for form in (volume.sample_by_rays, volume.sample_rays.reference.run)
    )
    assert len(fast.points) > 1000
    same = fast.offsets.diff() == plain.offsets.diff()
    assert same.float().mean() > 0.97  # a sample on the border of two cells may fall into either
    alike = [(one.points[same[one.rays]], one.numbers[same[one.rays]]) for one in (fast, plain)]
    assert torch.equal(alike[0][1], alike[1][1])
    assert torch.allclose(alike[0][0], alike[1][0], atol=1e-5)
    assert bool((fast.distances.diff() > 0)[fast.rays.diff() == 0].all()), "from near to far"


def test_samples_lie_in_the_box_where_the_mask_is_occupied() -> None:
    found, how = volume.sample_rays(*rays(200), march()), march()
    assert bool(((found.points >= how.box[:3] - 1e-5) & (found.points <= how.box[3:6] + 1e-5)).all())
    cells = ((found.points - how.frame[:3]) * how.frame[3:]).round().long()
    assert bool(how.mask[tuple(cells.T)].all())
    assert not len(volume.sample_rays(*rays(20), march(share=0.0)).points)


@pytest.mark.parametrize("columns", [1, 5])
def test_a_lookup_equals_grid_sample_and_its_gradient(columns: int) -> None:
    grid = torch.randn(5, 6, 7, columns, dtype=torch.float64, requires_grad=True)
    low, high = torch.tensor([-1.0, -2.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)
    points = low + (high - low) * (1.4 * torch.rand(50, 3, dtype=torch.float64) - 0.2)  # some outside
    frame, wanted = frame_of(low, high, grid.shape), torch.randn(50, columns, dtype=torch.float64)
    place = (2 * (points - low) / (high - low) - 1).flip(1)[None, :, None, None]
    theirs = F.grid_sample(grid.permute(3, 0, 1, 2)[None], place, align_corners=True, padding_mode="border")
    gradients = []
    for found in (
        theirs[0, :, :, 0, 0].T,
        volume.interpolate(grid, points, frame),
        volume.interpolate.reference.run(grid, points, frame),
    ):
        assert torch.allclose(found, theirs[0, :, :, 0, 0].T, atol=1e-12)
        gradients.append(torch.autograd.grad((found * wanted).sum(), grid)[0])
    assert torch.allclose(gradients[0], gradients[1], atol=1e-12)
    assert torch.allclose(gradients[0], gradients[2], atol=1e-12)


@pytest.mark.parametrize("form", [volume.composite, volume.composite.reference.run])
def test_weights_and_what_passes_add_up_to_one(form) -> None:
    alpha, offsets = alphas(1, 5, 0, 1, 40, dtype=torch.float32)
    weights, rest = form(alpha, offsets)
    assert torch.allclose(Ragged(weights, offsets).sums() + rest, torch.ones(4), atol=1e-6)
    assert rest[1] == 1, "an empty ray passes all"
    weights, rest = form(alpha[:0], torch.zeros(4, dtype=torch.int64))
    assert (len(weights), rest.tolist()) == (0, [1, 1, 1]), "rays without a sample"


def test_compositing_equals_a_loop_over_samples_in_float64() -> None:
    alpha, offsets = alphas(2, 3, 0, 7)
    weights, rest = volume.composite(alpha, offsets)
    for ray in range(3):
        passing = 1.0
        for at in range(int(offsets[ray]), int(offsets[ray + 1])):
            assert float(weights[at]) == pytest.approx(passing * float(alpha[at]), abs=1e-15)
            passing *= 1 - float(alpha[at])
        assert float(rest[ray]) == pytest.approx(passing, abs=1e-15)


def test_compositing_equals_that_of_nerfacc_in_float64() -> None:
    """Its dense form, which runs on processors."""
    nerfacc = pytest.importorskip("nerfacc")
    alpha, offsets = alphas(4, 6, 6, 6)
    dense = alpha.view(3, 6).clone().requires_grad_(True)
    theirs, passing = nerfacc.render_weight_from_alpha(dense)
    own = alpha.clone().requires_grad_(True)
    weights, rest = volume.composite(own, offsets)
    assert torch.allclose(weights.view(3, 6), theirs, atol=1e-15)
    assert torch.allclose(rest, passing[:, -1] * (1 - dense[:, -1]), atol=1e-15)
    wanted = torch.randn(3, 6, dtype=torch.float64)
    (theirs * wanted).sum().backward()
    (weights.view(3, 6) * wanted).sum().backward()
    assert torch.allclose(own.grad.view(3, 6), dense.grad, atol=1e-12)  # type: ignore[union-attr, arg-type]


def test_gradients_of_compositing_equal_those_of_the_plain_form_and_finite_differences() -> None:
    alpha, offsets = alphas(3, 4, 0, 9, 1)
    alpha[2] = 1.0  # opaque: nothing may be divided by 1 - alpha
    alpha.requires_grad_(True)
    weight, passing = torch.randn(14, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def total(form, values: torch.Tensor) -> torch.Tensor:
        weights, rest = form(values, offsets)
        return (weights * weight).sum() + (rest * passing).sum()

    fast = torch.autograd.grad(total(volume.composite_by_rays, alpha), alpha)[0]
    plain = torch.autograd.grad(total(volume.composite.reference.run, alpha), alpha)[0]
    assert torch.allclose(fast, plain, atol=1e-12)
    assert torch.autograd.gradcheck(lambda one: volume.composite_by_rays(one, offsets), alpha)


def test_opacity_is_the_papers_and_finite_far_away() -> None:
    raw = torch.linspace(-5, 5, 11, dtype=torch.float64)
    shift = volume.shift_of(1e-2)
    assert torch.allclose(volume.opacity(raw, shift, 0.5), 1 - (1 + (raw + shift).exp()) ** -0.5)
    assert float(volume.opacity(torch.zeros(1, dtype=torch.float64), shift, 1.0)) == pytest.approx(1e-2)
    far = torch.tensor([-1e4, 1e4], requires_grad=True)
    volume.opacity(far, shift, 0.5).sum().backward()
    assert bool(far.grad.isfinite().all())  # type: ignore[union-attr]


def test_no_samples_give_no_weights_and_a_gradient_of_nothing() -> None:
    grid = torch.zeros(3, 3, 3, 1, requires_grad=True)
    points, offsets = torch.zeros(0, 3), torch.zeros(4, dtype=torch.int64)
    alpha = volume.opacity(volume.interpolate(grid, points, torch.zeros(6))[:, 0], 0.0, 0.5)
    weights, rest = volume.composite(alpha, offsets)
    assert not len(weights)
    assert torch.equal(rest, torch.ones(3))
    rest.sum().backward()
    assert torch.equal(grid.grad, torch.zeros_like(grid))  # type: ignore[arg-type]
