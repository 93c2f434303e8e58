"""Energy of an image of a trained scene: operations, bytes and joules by part, and of its colour network by the paper's
formula, spiking and plain. Models, not measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from espalier.kernels import counts
from espalier.radiance import spikingnerf
from espalier.radiance.voxels import Rendered
from espalier.recipe import SpikingNerf, Voxels

_NAMES = {
    "": "rays: samples, opacity, compositing",
    "density": "grid of densities",
    "features": "grid of features",
    "colours": "colours: first layer",
    "colours.second": "colours: second layer",
    "colours.last": "colours: last layer",
}
_SPIKING = {"colours": "colours: first layer, neurons, spikes"}


class ImageEnergy(NamedTuple):
    """Of one view: counts by part; samples with a colour, rays that have some, spikes of both layers."""

    parts: Mapping[str, counts.Counts]
    samples: int
    rays: int
    spikes: Tensor


@torch.no_grad()
def of_view(model: nn.Module, view: Iterator[Rendered]) -> ImageEnergy:
    """Counts while `view` renders with `model`, chunk by chunk."""
    samples = 0
    met = 0
    spikes = torch.zeros(2, dtype=torch.float64)
    names = _NAMES
    with counts.Counter(model) as counter:
        for made in view:
            with counts.hidden():
                samples += len(made.points)
                met += int((made.offsets.diff() > 0).sum())
                if len(made.spikes):
                    spikes = spikes + made.spikes.cpu()
                    names = _NAMES | _SPIKING
    parts = {names.get(name, name): joules for name, joules in counter.parts.items()}
    return ImageEnergy(parts, samples, met, spikes)


def colour_rows(options: Voxels, energy: ImageEnergy) -> Sequence[tuple[Any, ...]]:
    """(network, directions multiplied once a ray or for each sample, MACs, accumulations, joules, share of the plain
    network's joules): 4.6 pJ a MAC and 0.9 pJ an accumulation, as in the paper; memory is left out, as there."""
    plain = Voxels(resolution=options.resolution, features=options.features, width=options.width)
    kinds = {"spiking": options, "plain": plain} if isinstance(options, SpikingNerf) else {"plain": plain}
    rows = []
    for hoists in (True, False):
        base = spikingnerf.operations(plain, energy.samples, energy.rays, energy.spikes, hoists).joules()
        for name, kind in kinds.items():
            done = spikingnerf.operations(kind, energy.samples, energy.rays, energy.spikes, hoists)
            share = done.joules() / base if base else 1.0
            where = "once a ray" if hoists else "for each sample"
            rows.append((name, where, done.macs, done.acs, done.joules(), share))
    return rows
