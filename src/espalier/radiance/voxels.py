"""Radiance fields on voxel grids: a coarse stage that finds where something is, and a fine one with a colour network.

After DVGO (Sun et al., CVPR 2022, arXiv 2111.11215). Rays are sampled at half a cell; samples in cells that the coarse
stage found empty, of opacity below 1e-4, and of weight below 1e-4 are left out before colours are computed. Other than
there: the fine density begins with the coarse one, and all cells have one learning rate. Grids hold a hundredth of
their values, so that one rate of Adam moves them a hundred times as fast as the colour network, as there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from espalier.kernels import counts
from espalier.kernels.ragged import Ragged
from espalier.radiance import volume_rendering as volume
from espalier.radiance.rays import Rays
from espalier.radiance.volume_rendering import March, RaySamples, SceneBox, frame_of

LEAST, LEAST_COARSE = 1e-4, 1e-7
"""Opacity and weight below which a sample is left out; by a coarse field, which begins all but empty."""
OCCUPIED = 1e-3
"""Opacity of a step above which the coarse stage takes a cell for occupied."""
STEP = 0.5
"""Of a ray, in cells."""
_SCALE = 100.0
_BANDS = 4
VIEW = 3 + 6 * _BANDS
"""Columns of an encoded direction."""
MASK = 64
"""Cells of a side of the occupancy mask."""


class Rendered(NamedTuple):
    """What a field makes of rays.

    Attributes:
        colours: [rays, 3]; rest: [rays], what passes all samples; depths: [rays], mean distance.
        weights, points: [samples] and [samples, 3], of the samples that have a colour; offsets: int64 [rays + 1].
        spikes: float64 [layers] of a spiking network, differentiable; empty otherwise.
    """

    colours: Tensor
    rest: Tensor
    depths: Tensor
    weights: Tensor
    points: Tensor
    offsets: Tensor
    spikes: Tensor


def encoded(views: Tensor) -> Tensor:
    """Directions [rays, 3] with sines and cosines of 1, 2, 4 and 8 times them: [rays, 27]."""
    bands = (views[:, :, None] * 2.0 ** torch.arange(_BANDS, device=views.device)).flatten(1)
    return torch.cat([views, bands.sin(), bands.cos()], 1)


def ray_losses(colours: Tensor, rest: Tensor, true: Tensor, entropy: float) -> Tensor:
    """[rays]: the squared error of colours [rays, 3], a mean over the three, and `entropy` times that of `rest` [rays],
    what passes all samples (DVGO's loss)."""
    passed = rest.clamp(1e-6, 1 - 1e-6)
    unsure = -(passed * passed.log() + (1 - passed) * (1 - passed).log())
    return (colours - true).square().mean(1) + entropy * unsure


def sample_losses(rendered: Rendered, true: Tensor) -> Tensor:
    """[samples]: the squared error of each sample's colour, by its weight. `true`: [rays, 3]."""
    rows = torch.repeat_interleave(true, rendered.offsets.diff(), 0)
    return rendered.weights.detach() * (rendered.points - rows).square().sum(1)


class VoxelGrid(nn.Module):
    """A voxel grid over a box: [x, y, z, columns]; its corners lie in the box's."""

    def __init__(self, size: int, columns: int, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(size, size, size, columns))
        self.register_buffer("box", torch.stack([low, high]).float())

    box: Tensor

    def forward(self, points: Tensor) -> Tensor:
        """[points, columns]."""
        frame = frame_of(self.box[0], self.box[1], self.values.shape)
        with counts.hidden():
            values = _SCALE * volume.interpolate(self.values, points, frame)
        if counts.is_counting():
            counts.record(
                counts.Counts(macs=8.0 * values.numel(), bytes_moved=4.0 * (9 * values.numel() + points.numel()))
            )
        return values


class Field(nn.Module):
    """A density grid, a grid of features, and what makes colours of these (see `ColourNetwork`; None: the features are
    the colours).

    `mask`: bool [x, y, z] over the scene's box. Distances are in cells of `size` along the box of the stage.
    """

    mask: Tensor

    def __init__(self, scene_box: SceneBox, size: int, features: int, alpha: float, colours: nn.Module | None) -> None:
        super().__init__()
        low = scene_box.low.float()
        high = scene_box.high.float()
        self.density = VoxelGrid(size, 1, low, high)
        self.features = VoxelGrid(size, features, low, high)
        self.colours = colours
        self.register_buffer("mask", torch.ones(MASK, MASK, MASK, dtype=torch.bool))
        self.scene_box = scene_box
        self.size = size
        self.shift = volume.shift_of(alpha)
        self.background = (1.0, 1.0, 1.0)

    @property
    def step(self) -> float:
        """Length of a step: half the mean side of a cell."""
        box = self.density.box
        return STEP * float(((box[1] - box[0]) / (self.size - 1)).prod().abs() ** (1 / 3))

    def march(self) -> March:
        """How rays are sampled."""
        box = self.density.box
        whole = self.scene_box
        packed = torch.cat([box.flatten(), torch.tensor([whole.near, whole.far], device=box.device)])
        low, high = (corner.to(box.device).float() for corner in (whole.low, whole.high))
        return March(packed, self.step, self.mask, frame_of(low, high, self.mask.shape))

    def alpha(self, points: Tensor) -> Tensor:
        """Opacity of a step at points: [points]."""
        return volume.opacity(self.density(points)[:, 0], self.shift, STEP)

    def forward(self, rays: Rays) -> Rendered:
        """Colours of rays; those that meet nothing have the background's."""
        samples = volume.sample_rays(rays.origins, rays.directions, self.march())
        alpha = self.alpha(samples.points)
        least = LEAST if self.colours is not None else LEAST_COARSE
        keep = alpha.detach() > least
        samples = samples.selected(keep)
        alpha = alpha[keep]
        weights, rest = volume.composite(alpha, samples.offsets)
        keep = weights.detach() > least
        samples = samples.selected(keep)
        weights = weights[keep]
        points, spikes = self._colours(samples, rays.views)
        background = torch.tensor(self.background, dtype=weights.dtype, device=weights.device)
        colours = Ragged(weights[:, None] * points, samples.offsets).sums() + rest[:, None] * background
        depths = Ragged(weights * samples.distances, samples.offsets).sums() + rest * self._last(rays)
        return Rendered(colours, rest, depths.detach(), weights, points, samples.offsets, spikes)

    def _colours(self, samples: RaySamples, views: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(samples.points)
        if self.colours is None:
            return features.sigmoid(), torch.zeros(0, dtype=torch.float64)
        points, spikes = self.colours(features, views, samples)
        return points, spikes

    def _last(self, rays: Rays) -> Tensor:
        """A distance behind the box."""
        box = self.density.box
        return (rays.origins - box.mean(0)).norm(dim=1) + 0.5 * (box[1] - box[0]).norm()


class ColourNetwork(nn.Module):
    """Colours from features and directions: two hidden layers of `width` without biases.

    The directions are the same all along a ray, so that their part of the first product is made once a ray.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(features + VIEW, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, 3, bias=False)
        self.columns = features

    def matrix(self, layer: nn.Linear) -> Tensor:
        """What a layer multiplies by: [outputs, inputs]."""
        return layer.weight

    def currents(self, features: Tensor, views: Tensor, samples: RaySamples) -> Tensor:
        """What the first hidden layer gets: [samples, width]. Products for directions are made once a ray."""
        own_rows, towards = self.matrix(self.first).split([self.columns, VIEW], 1)
        return features @ own_rows.T + (encoded(views).to(features.dtype) @ towards.T)[samples.rays]

    def forward(self, features: Tensor, views: Tensor, samples: RaySamples) -> tuple[Tensor, Tensor]:
        """(colours [samples, 3], no spikes)."""
        hidden = F.relu(self.second(F.relu(self.currents(features, views, samples))))
        return self.last(hidden).sigmoid(), torch.zeros(0, dtype=torch.float64)


# --- from coarse to fine -----------------------------------------------------------------------------------------


def occupancy(field: Field) -> Tensor:
    """bool [64, 64, 64] over the scene's box: cells in or beside which an opacity is above 1e-3; all where none is."""
    low = field.scene_box.low.float()
    high = field.scene_box.high.float()
    with torch.no_grad():
        alpha = field.alpha(_lattice(low, high, MASK)).view(1, 1, MASK, MASK, MASK)
    occupied = F.max_pool3d(alpha, 3, 1, 1)[0, 0] > OCCUPIED
    return occupied if bool(occupied.any()) else torch.ones_like(occupied)


def _lattice(low: Tensor, high: Tensor, size: int) -> Tensor:
    """[size ** 3, 3]: corners of all cells of a box, `size` along each axis."""
    axes = [torch.linspace(*ends, size) for ends in zip(low.tolist(), high.tolist(), strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, 3)


def tight_box(field: Field, mask: Tensor) -> Tensor:
    """[2, 3]: the smallest box round all occupied cells, half a cell larger."""
    low = field.scene_box.low.float()
    high = field.scene_box.high.float()
    cells = mask.nonzero()
    side = (high - low) / (MASK - 1)
    return torch.stack([low + (cells.amin(0) - 0.5) * side, low + (cells.amax(0) + 0.5) * side])


@torch.no_grad()
def refined(coarse: Field, fine: Field) -> dict[str, Tensor]:
    """What the state of a coarse field becomes in a fine one: mask, box, and the density where both are defined."""
    mask = occupancy(coarse)
    box = tight_box(coarse, mask)
    points = _lattice(box[0], box[1], fine.size)
    coarser = float((coarse.density.box[1] - coarse.density.box[0]).prod() / (box[1] - box[0]).prod()) ** (1 / 3)
    coarser *= (fine.size - 1) / (coarse.size - 1)  # a step of the coarse field is so many of the fine one
    dense = F.softplus(coarse.density(points)[:, 0] + coarse.shift) / coarser
    least = F.softplus(torch.tensor(fine.shift))
    raw = torch.where(dense > least, dense + torch.log(-torch.expm1(-dense)), fine.shift) - fine.shift
    return {
        "mask": mask,
        "density.box": box,
        "features.box": box,
        "density.values": (raw / _SCALE).view(fine.size, fine.size, fine.size, 1),
    }
