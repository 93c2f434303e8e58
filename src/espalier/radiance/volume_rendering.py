"""Rays through voxel grids: where they are sampled, what a grid is there, and how samples become a pixel.

Each operation has its plain form in PyTorch; the fast forms on processors are in volume_cpu.py. Samples of a ray stand
from near to far in `Ragged` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from espalier.kernels.base import operation
from espalier.kernels.ragged import Ragged, offsets_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


@dataclass(frozen=True)
class SceneBox:
    """A box in space, and what of a ray is looked at: `low` and `high` corners, distances `near` and `far`."""

    low: Tensor
    high: Tensor
    near: float = 0.0
    far: float = 1e6

    @property
    def packed(self) -> Tensor:
        """All of it: float32 [8]."""
        return torch.cat([self.low.float(), self.high.float(), torch.tensor([self.near, self.far])])


class RaySamples(NamedTuple):
    """Of rays: `points` float32 [samples, 3], their distances, their numbers on the ray, and `offsets` [rays + 1]."""

    points: Tensor
    distances: Tensor
    numbers: Tensor
    offsets: Tensor

    @property
    def rays(self) -> Int64[Tensor, " samples"]:
        """The ray of each sample."""
        return Ragged(self.numbers, self.offsets).row_ids()

    def selected(self, keep: Tensor) -> RaySamples:
        """Those where `keep` holds."""
        offsets = Ragged(self.numbers, self.offsets).selected(keep).offsets
        return RaySamples(self.points[keep], self.distances[keep], self.numbers[keep], offsets)


def frame_of(low: Tensor, high: Tensor, sizes: torch.Size | tuple[int, ...]) -> Tensor:
    """What turns a place into one of a grid whose corners lie in the box's: the lowest corner, and cells per length."""
    cells = torch.tensor([size - 1 for size in sizes[:3]], dtype=low.dtype, device=low.device)
    return torch.cat([low, cells / (high - low)])


class March(NamedTuple):
    """How rays are sampled: in `box` (`SceneBox.packed`) at each `step`, where `mask` (bool [x, y, z] over `frame`) is
    occupied."""

    box: Tensor
    step: float
    mask: Tensor
    frame: Tensor

    @property
    def packed(self) -> Tensor:
        """All but the mask: float32 [15]."""
        return torch.cat([self.box, torch.tensor([self.step], device=self.box.device), self.frame]).float()


@operation("sample_rays")
def sample_rays(origins: Tensor, directions: Tensor, march: March) -> RaySamples:
    """Samples in the middle of equal steps from where a ray enters the box; those in empty cells are left out.

    Args:
        origins, directions: float32 [rays, 3]; directions of length 1.
    """
    box = march.box
    step = march.step
    still = directions.abs() < 1e-9
    away = torch.where(still, torch.ones_like(directions), directions)
    near = (box[:3] - origins) / away
    two = (box[3:6] - origins) / away
    outside = (still & ((origins < box[:3]) | (origins > box[3:6]))).any(1)
    first = torch.where(still, -torch.inf, torch.minimum(near, two)).amax(1).clamp(min=float(box[6]))
    last = torch.where(still, torch.inf, torch.maximum(near, two)).amin(1).clamp(max=float(box[7]))
    steps = torch.where(outside, 0, torch.ceil((last - first) / step - 0.5).clamp(min=0)).long()
    numbers = torch.arange(int(steps.max()) if len(steps) else 0, device=origins.device)
    t = first[:, None] + (numbers + 0.5) * step
    points = origins[:, None] + t[:, :, None] * directions[:, None]
    cells = ((points - march.frame[:3]) * march.frame[3:]).round().long()
    sizes = torch.tensor(march.mask.shape, device=origins.device)
    inside = ((cells >= 0) & (cells < sizes)).all(2) & (numbers < steps[:, None])
    i, j, k = torch.where(inside[:, :, None], cells, 0).unbind(2)
    keep = inside & march.mask[i, j, k]
    return RaySamples(points[keep], t[keep], numbers.expand_as(keep)[keep], offsets_of(keep.sum(1)))


@sample_rays.fast("cpu", wins=lambda origins, directions, march: origins.dtype == torch.float32)
def sample_by_rays(origins: Tensor, directions: Tensor, march: March) -> RaySamples:
    """numba, a ray at a time: counted, then written."""
    from espalier.radiance import volume_rendering_cpu as volume_cpu

    rays = torch.cat([origins, directions], 1)
    how = march.packed
    counts = torch.zeros(len(origins), dtype=torch.int64)
    volume_cpu.count_samples(rays, how, march.mask, counts)
    offsets = offsets_of(counts)
    out = torch.empty(int(offsets[-1]), 4)
    numbers = torch.empty(int(offsets[-1]), dtype=torch.int64)
    volume_cpu.fill_samples(rays, how, march.mask, offsets, out, numbers)
    return RaySamples(out[:, :3].contiguous(), out[:, 3].contiguous(), numbers, offsets)


# --- what a grid is at a point -----------------------------------------------------------------------------------


@operation("interpolate")
def interpolate(
    grid: Float[Tensor, "x y z columns"], points: Float[Tensor, "points 3"], frame: Tensor
) -> Float[Tensor, "points columns"]:
    """The trilinear mean of a grid at points: `F.grid_sample(align_corners=True, padding_mode="border")`.

    Differentiable in the grid. `frame`: of the grid (`frame_of`).
    """
    sizes = torch.tensor(grid.shape[:3], device=grid.device)
    place = (points - frame[:3]) * frame[3:]
    place = torch.minimum(place.clamp(min=0), (sizes - 1).to(place.dtype))
    low = torch.minimum(place.long(), sizes - 2)
    share = place - low
    flat = grid.reshape(-1, grid.shape[3])
    values = grid.new_zeros(len(points), grid.shape[3])
    for corner in range(8):
        bits = torch.tensor([corner >> 2, (corner >> 1) & 1, corner & 1], device=grid.device)
        weight = torch.where(bits.bool(), share, 1 - share).prod(1)
        i, j, k = (low + bits).unbind(1)
        values = values + weight[:, None] * flat[(i * sizes[1] + j) * sizes[2] + k]
    return values


@interpolate.fast("cpu", wins=lambda grid, points, frame: grid.dtype in (torch.float32, torch.float64))
def interpolate_by_points(grid: Tensor, points: Tensor, frame: Tensor) -> Tensor:
    """numba, a point at a time."""
    return _Interpolate.apply(grid, points, frame)


class _Interpolate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Tensor, points: Tensor, frame: Tensor) -> Tensor:
        from espalier.radiance import volume_rendering_cpu as volume_cpu

        ctx.save_for_backward(points, frame)
        ctx.shape = grid.shape
        points = points.to(grid.dtype).contiguous()
        frame = frame.to(grid.dtype)
        out = grid.new_empty(len(points), grid.shape[3])
        volume_cpu.interpolate(grid.contiguous(), points, frame, out)  # not detached: its memory may be resized
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from espalier.radiance import volume_rendering_cpu as volume_cpu

        points, frame = ctx.saved_tensors
        (gradient,) = gradients
        out = gradient.new_zeros(ctx.shape)
        points = points.to(gradient.dtype).contiguous()
        frame = frame.to(gradient.dtype)
        volume_cpu.scatter(gradient.contiguous(), points, frame, out)
        return out, None, None


# --- from samples to pixels --------------------------------------------------------------------------------------


def opacity(raw: Tensor, shift: float, interval: float) -> Tensor:
    """alpha = 1 - (1 + exp(raw + shift))^(-interval), finite for any `raw` (DVGO, arXiv 2111.11215, equation 9)."""
    return -torch.expm1(-interval * torch.nn.functional.softplus(raw + shift))


def shift_of(alpha: float) -> float:
    """The shift at which `opacity` of 0 is `alpha` over an interval of 1."""
    return float(torch.logit(torch.tensor(alpha, dtype=torch.float64)))


@operation("composite")
def composite(
    alpha: Float[Tensor, " samples"], offsets: Int64[Tensor, " rays_and_one"]
) -> tuple[Float[Tensor, " samples"], Float[Tensor, " rays"]]:
    """(weights w_i = T_i alpha_i with T_i the product of 1 - alpha over the samples before, what passes all of a ray's
    samples). The weights of a ray and what passes it add up to 1. Differentiable."""
    rows = Ragged(alpha, offsets)
    padded = rows.padded()
    before = torch.cat([padded.new_ones(len(padded), 1), 1 - padded], 1).cumprod(1)
    weights = padded * before[:, :-1]
    mask = torch.arange(padded.shape[1], device=alpha.device) < rows.lengths[:, None]
    return weights[mask], before[:, -1]


@composite.fast("cpu", wins=lambda alpha, offsets: alpha.dtype in (torch.float32, torch.float64))
def composite_by_rays(alpha: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """numba, a ray at a time."""
    return _Composite.apply(alpha, offsets)


class _Composite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, alpha: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        from espalier.radiance import volume_rendering_cpu as volume_cpu

        alpha = alpha.contiguous()
        ctx.save_for_backward(alpha, offsets)
        weights = torch.empty_like(alpha)
        rest = alpha.new_zeros(len(offsets) - 1)
        volume_cpu.composite(alpha.detach(), offsets, weights, rest)
        return weights, rest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from espalier.radiance import volume_rendering_cpu as volume_cpu

        alpha, offsets = ctx.saved_tensors
        of_weights, of_rest = (gradient.contiguous() for gradient in gradients)
        out = torch.empty_like(alpha)
        volume_cpu.composite_backward(alpha, offsets, of_weights, of_rest, out)
        return out, None
