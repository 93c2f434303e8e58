"""SpikingNeRF: a spiking colour network whose time steps are the samples along a ray, from near to far.

After Yao et al., arXiv 2309.10987 (Frontiers in Neuroscience 2025). A leaky integrate-and-fire (LIF) neuron starts at 0
on every ray and carries its membrane from sample to sample:

    m = v + (x - v) / tau,  s = [m >= threshold],  v = m (1 - s)          tau = 2, threshold = 1, hard reset

Backward takes ds/dm for 4 q (1 - q) with q = sigmoid(4 (m - threshold)), and does not differentiate the reset. The
paper gives rays equal lengths by temporal condensing and padding (TCP). Without biases a tail of zeros cannot fire, so
here rays stay ragged: the spikes are the same, and padding is neither stored nor calculated. For backward a layer keeps
its membranes before their reset, 4 bytes a neuron and step, and not spikes packed to bits: the surrogate gradient needs
the membrane of each step, spikes follow from it, and to make it again from the currents would keep as many bytes of
those. The other alignments are
there to be compared: `tp` keeps samples at their numbers on the ray, so that membranes leak over gaps; `repeated` shows
each sample to the network four times and takes the mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from espalier.kernels import counts
from espalier.kernels.base import operation
from espalier.kernels.ragged import Ragged, offsets_of
from espalier.radiance.volume_rendering import RaySamples
from espalier.radiance.voxels import VIEW, ColourNetwork
from espalier.recipe import SpikingNerf, Voxels
from espalier.recipe.cost import Product, Work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float, Int64

REPEATS = 4
"""Time steps of each sample under `repeated`."""


FIRING = 6.0
"""Times PyTorch's initial weights: with those, or three times as large ones, hardly a neuron of the second layer fires
at first (rates below 0.01), and a neuron that does not fire passes little gradient."""
PIECE = 4096
"""Samples of a layer that is computed at a time: those of 64 neurons take 1 MB."""
RATE = 10.0
"""Times the learning rate of a plain network, as matrices are ten times what Adam moves: thresholds do not shrink
with the steps."""


SCANNED = 4
"""Values that a step of a neuron counts as moving in forward, and twice that in backward; of a plain network's they are
3. Measured: a training step of a spiking field takes 1.1 times that of a plain one."""


class Neuron(NamedTuple):
    """A LIF neuron: its time constant in steps, its threshold, and the steepness of the surrogate gradient."""

    tau: float = 2.0
    threshold: float = 1.0
    steepness: float = 4.0


LIF = Neuron()


class _Spike(torch.autograd.Function):
    """1 where a membrane reaches 0, with the derivative of sigmoid(steepness x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steepness: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.steepness = steepness
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        smooth = torch.sigmoid(ctx.steepness * x)
        return gradients[0] * ctx.steepness * smooth * (1 - smooth), None


def lif_scan_padded(currents: Float[Tensor, "rays time channels"], neuron: Neuron = LIF) -> Tensor:
    """Spikes of a rectangle, a time step after the other: the paper's TCP, and what SpikingJelly's `LIFNode` gives with
    `step_mode="m"` and `detach_reset=True`."""
    membrane = torch.zeros_like(currents[:, 0]) if currents.shape[1] else currents[:, :0]
    spikes = []
    for x in currents.unbind(1):
        charged = membrane + (x - membrane) / neuron.tau
        spikes.append(_Spike.apply(charged - neuron.threshold, neuron.steepness))
        membrane = charged * (1 - spikes[-1].detach())
    return torch.stack(spikes, 1) if spikes else currents


@operation("lif_scan")
def lif_scan(
    currents: Float[Tensor, "samples channels"], offsets: Int64[Tensor, " rays_and_one"], neuron: Neuron = LIF
) -> Float[Tensor, "samples channels"]:
    """Spikes (0 or 1) of LIF neurons along ragged rays; membranes start at 0 on each.

    Args:
        currents: inputs of each sample, those of a ray one after the other.
        offsets: of the rays (`Ragged.offsets`).
    Differentiable, by the surrogate gradient.
    """
    rows = Ragged(currents, offsets)
    spikes = lif_scan_padded(rows.padded(), neuron)
    return Ragged.of_padded(spikes, rows.lengths).values


@lif_scan.fast("cpu", wins=lambda currents, *_: currents.dtype in (torch.float32, torch.float64))
def lif_scan_ragged(currents: Tensor, offsets: Tensor, neuron: Neuron = LIF) -> Tensor:
    """numba: each real sample once. For backward membranes before their reset are kept, which say who fired."""
    return _Layer.apply(currents, offsets, None, neuron)[0]


@operation("spiking_layer")
def spiking_layer(
    currents: Float[Tensor, "samples channels"],
    offsets: Int64[Tensor, " rays_and_one"],
    weight: Float[Tensor, "outputs channels"],
    neuron: Neuron = LIF,
) -> tuple[Tensor, Tensor]:
    """(`lif_scan` @ weight.T [samples, outputs], how many spikes: float64 [], exact). Differentiable."""
    spikes = lif_scan(currents, offsets, neuron)
    return spikes @ weight.T, spikes.sum(0).double().sum()


@spiking_layer.fast("cpu", wins=lambda currents, *_: currents.dtype in (torch.float32, torch.float64))
def spiking_layer_by_pieces(
    currents: Tensor, offsets: Tensor, weight: Tensor, neuron: Neuron = LIF
) -> tuple[Tensor, Tensor]:
    """Some rays at a time: their spikes stay in a processor's cache, and are made again in backward from the membranes
    before their reset, which are all that is kept."""
    product, number = _Layer.apply(currents, offsets, weight, neuron)
    return product, number


def _pieces(offsets: Tensor) -> Iterator[tuple[Tensor, slice, slice]]:
    """(offsets of some rays, which rays, which samples): at most `PIECE` samples at a time, or one ray."""
    bounds = offsets.numpy()
    first = 0
    while first < len(bounds) - 1:
        last = max(first + 1, int(bounds.searchsorted(bounds[first] + PIECE, "right")) - 1)
        yield offsets[first : last + 1], slice(first, last), slice(int(bounds[first]), int(bounds[last]))
        first = last


class _Layer(torch.autograd.Function):
    """Spikes, or their product with a matrix, and their number."""

    @staticmethod
    def forward(ctx: Any, currents: Tensor, offsets: Tensor, weight: Tensor | None, neuron: Neuron) -> Any:
        from espalier.radiance import lif_cpu

        currents = currents.detach().contiguous()
        numbers = torch.zeros_like(offsets)
        charged = torch.empty_like(currents)
        ctx.neuron = torch.tensor(neuron, dtype=currents.dtype)
        out = torch.empty_like(currents) if weight is None else currents.new_empty(len(currents), len(weight))
        for rays, which, rows in _pieces(offsets):
            spikes = out[rows] if weight is None else torch.empty_like(currents[rows])
            lif_cpu.scan(currents, rays, ctx.neuron, charged, spikes, numbers[which])
            if weight is not None:
                torch.mm(spikes, weight.T, out=out[rows])
        ctx.save_for_backward(charged, offsets, weight)
        return out, numbers.sum().double()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from espalier.radiance import lif_cpu

        charged, offsets, weight = ctx.saved_tensors
        given = gradients[0]
        each = float(gradients[1])
        of_currents = torch.empty_like(charged)
        of_weight = None if weight is None else torch.zeros_like(weight)
        taylor = torch.tensor(lif_cpu.TAYLOR, dtype=charged.dtype)
        for rays, _, rows in _pieces(offsets):
            of_hidden = of_currents[rows]
            spikes = torch.empty_like(charged[rows])
            if weight is None:
                of_hidden.copy_(given[rows])
            else:
                torch.mm(given[rows], weight, out=of_hidden)
            if each:
                of_hidden += each
            lif_cpu.scan_backward(charged, rays, ctx.neuron, taylor, of_currents, spikes)
            if of_weight is not None:
                of_weight.addmm_(given[rows].T, spikes)
        return of_currents, None, of_weight, None


# --- the colour network ------------------------------------------------------------------------------------------


class SpikingColours(ColourNetwork):
    """Colours from spikes: linear, LIF, linear, LIF, linear, sigmoid, without biases.

    The first product has real inputs, those after have spikes. `alignment`: `tcp`, `tp` or `repeated`; `flip`: samples
    are time steps from far to near.
    """

    def __init__(self, features: int, width: int, alignment: str = "tcp", flip: bool = False) -> None:
        super().__init__(features, width)
        self.alignment = alignment
        self.flip = flip
        for layer, scale in ((self.first, FIRING), (self.second, FIRING), (self.last, 1.0)):
            layer.weight.data *= scale / RATE

    def matrix(self, layer: nn.Linear) -> Tensor:
        return RATE * layer.weight

    def forward(self, features: Tensor, views: Tensor, samples: RaySamples) -> tuple[Tensor, Tensor]:
        """(colours [samples, 3], spikes of both layers: float64 [2], differentiable)."""
        currents = self.currents(features, views, samples)
        order = Ragged(samples.numbers, samples.offsets).reversal() if self.flip else None
        times = samples.numbers
        offsets = samples.offsets
        if order is not None:
            currents = currents[order]
            times = -times[order]
        if self.alignment == "tcp" and self._infers(currents):
            logits, spikes = self._from_spikes(currents, offsets)
        else:
            currents, offsets, places = aligned(currents, times, offsets, self.alignment)
            logits, spikes = self._layers(currents, offsets)
            logits = logits.view(-1, REPEATS, 3).mean(1) if self.alignment == "repeated" else logits[places]
        if order is not None:
            logits = logits[order]  # its own inverse
        return logits.sigmoid(), spikes

    def _layers(self, currents: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        first_charge, first = spiking_product(currents, offsets, self.matrix(self.second))
        two, second = spiking_product(first_charge, offsets, self.matrix(self.last))
        return two, torch.stack([first, second])

    def _infers(self, currents: Tensor) -> bool:
        return not torch.is_grad_enabled() and currents.device.type == "cpu" and currents.dtype == torch.float32

    def _from_spikes(self, currents: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """By the kernel that adds the rows of neurons that fire."""
        from espalier.radiance import lif_cpu

        second = self.matrix(self.second)
        last = self.matrix(self.last)
        rows = nn.functional.pad(torch.cat([second, last]), (0, 1)).T.contiguous()
        with counts.hidden():
            out = torch.empty(len(currents), 3)
            per_ray = torch.zeros(len(offsets) - 1, 2, dtype=torch.int64)
            lif_cpu.infer(currents.contiguous(), offsets, torch.tensor(LIF), rows, out, per_ray)
            spikes = per_ray.sum(0).double()
        if counts.is_counting():
            counts.record(layer_counts(currents, offsets, second, spikes[0]))
            counts.record(layer_counts(currents, offsets, last, spikes[1]))
        return out, spikes


def spiking_product(currents: Tensor, offsets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`spiking_layer`, counted by `layer_counts`."""
    with counts.hidden():
        answer, number = spiking_layer(currents, offsets, weight)
    if counts.is_counting():
        counts.record(layer_counts(currents, offsets, weight, number, torch.is_grad_enabled()))
    return answer, number


def layer_counts(
    currents: Tensor, offsets: Tensor, weight: Tensor, spikes: Tensor, keeps: bool = False
) -> counts.Counts:
    """What a layer of neurons and its product count for, whichever kernel makes them.

    Two operations for each neuron and step, and one accumulation for each spike and output (SOPs). Bytes are those of a
    scan and a product that are operations of their own, as a plain network's ReLU and product are counted: currents
    and offsets are read; spikes are written and read, values of the currents' type, which are not packed; the matrix is
    read once and the results are written. A kernel that keeps spikes in a processor's cache gets nothing off for it.
    `keeps`: membranes are written for backward too.
    """
    values = (4 if keeps else 3) * currents.numel() + weight.numel() + len(currents) * len(weight)
    moved = currents.element_size() * values + offsets.element_size() * offsets.numel()
    acs = float(spikes.detach()) * len(weight)
    return counts.Counts(acs=acs, other=2.0 * currents.numel(), bytes_moved=float(moved))


def aligned(currents: Tensor, times: Tensor, offsets: Tensor, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """(currents in time, their offsets, where each sample is among them).

    `tcp`: as they are. `tp`: a ray's samples at their `times`, the gaps between them zero. `repeated`: each sample four
    times in a row of its own.
    """
    numbers = torch.arange(len(currents) + 1, device=currents.device)
    if how == "tcp":
        return currents, offsets, numbers[:-1]
    if how == "repeated":
        return currents.repeat_interleave(REPEATS, 0), REPEATS * numbers, REPEATS * numbers[:-1]
    full = offsets.diff() > 0
    firsts, lasts = torch.zeros(2, len(full), dtype=torch.int64, device=currents.device)
    firsts[full] = times[offsets[:-1][full]]
    lasts[full] = times[offsets[1:][full] - 1]
    spans = torch.where(full, lasts - firsts + 1, 0)
    wider = offsets_of(spans)
    rays = Ragged(times, offsets).row_ids()
    places = wider[rays] + times - firsts[rays]
    return currents.new_zeros(int(wider[-1]), currents.shape[1]).index_copy(0, places, currents), wider, places


def network_work(options: Voxels, samples: Any, rays: Any) -> Work:
    """What a colour network asks of a device for samples on rays: products, and by neuron and time step the scan. Of
    `repeated` samples all but the first product is done for each of the steps."""
    width = options.width
    columns = options.features
    steps = samples
    moved = 6.0 * width * samples
    saved = (columns + 2 * width + 6) * samples
    if isinstance(options, SpikingNerf):
        steps = samples * (REPEATS if options.alignment == "repeated" else 1)
        gaps = width * (options.alignment == "tp")  # currents once more, at their places in time
        moved = 2.0 * SCANNED * width * steps
        saved = (columns + 8 + gaps) * samples + 2 * width * steps  # membranes of both layers
    products = Product(samples, columns, width), Product(rays, VIEW, width), Product(steps, width, width + 3)
    return Work(products, 0.0, 4.0 * moved, 4.0 * (saved + VIEW * rays), 0.0, 0.0, rays, rays)


# --- energy ------------------------------------------------------------------------------------------------------


def operations(options: Voxels, samples: float, rays: float, spikes: Tensor, hoists: bool = True) -> counts.Counts:
    """What the colour network does: multiplications of real values, and an accumulation for each spike and output.

    Args:
        samples, rays: with a colour, and rays that have some; with `hoists` directions are multiplied once a ray.
        spikes: of both layers of a spiking network.
    """
    width = options.width
    first = width * (samples * options.features + (rays if hoists else samples) * VIEW)
    if not isinstance(options, SpikingNerf):
        return counts.Counts(macs=first + samples * (width * width + 3 * width))
    return counts.Counts(macs=first, acs=float(accumulations(options.width, spikes.detach())))


def accumulations(width: int, spikes: Tensor) -> Tensor:
    """One for each output of the layer after, of spikes [2] of both layers."""
    return spikes[0] * width + spikes[1] * 3
