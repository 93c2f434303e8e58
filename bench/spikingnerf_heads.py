"""Colour networks with the neurons of other libraries, on padded rays, and what a pass of one takes: seconds, bytes
that it keeps for backward, and bytes of its tensors at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from espalier.kernels.ragged import Ragged
from espalier.parallel.workload import Shard
from espalier.radiance import spikingnerf
from espalier.radiance.rays import Rays
from espalier.radiance.spikingnerf import SpikingColours
from espalier.radiance.volume_rendering import RaySamples
from espalier.radiance.voxels import Field
from espalier.radiance.workload import RadianceWorkload


class JellyColours(SpikingColours):
    """On padded rays with SpikingJelly's `LIFNode`."""

    def neurons(self) -> list[nn.Module]:
        from spikingjelly.activation_based import neuron

        return [neuron.LIFNode(tau=2.0, detach_reset=True, step_mode="m") for _ in range(2)]

    def scan(self, node: Any, x: Tensor) -> Tensor:
        node.reset()
        found: Tensor = node(x)
        return found

    def _infers(self, currents: Tensor) -> bool:
        return False

    def _layers(self, currents: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_nodes"):
            object.__setattr__(self, "_nodes", self.neurons())
        lengths = offsets.diff()
        rows = Ragged.of_lengths(currents, lengths[lengths > 0])  # rays without samples are left out, as in the paper
        mask = torch.arange(int(rows.lengths.max()))[None] < rows.lengths[:, None]
        x = rows.padded().transpose(0, 1).contiguous()
        one = self.scan(self._nodes[0], x)
        two = self.scan(self._nodes[1], one @ self.matrix(self.second).T)
        own = [layer.transpose(0, 1)[mask] for layer in (one, two)]
        return own[1] @ self.matrix(self.last).T, torch.stack([layer.sum(0).double().sum() for layer in own])


class SnnTorchColours(JellyColours):
    """On padded rays with snnTorch's `Leaky`, which resets in the step after a spike."""

    def neurons(self) -> list[nn.Module]:
        import snntorch

        grad = snntorch.surrogate.sigmoid(slope=4)
        return [snntorch.Leaky(beta=0.5, threshold=1.0, reset_mechanism="zero", spike_grad=grad) for _ in range(2)]

    def scan(self, node: Any, x: Tensor) -> Tensor:
        membrane, spikes = node.reset_mem(), []
        for now in (0.5 * x).unbind(0):
            fired, membrane = node(now, membrane)
            spikes.append(fired)
        return torch.stack(spikes)


class PaddedColours(JellyColours):
    """On padded rays, a step of time after the other in PyTorch."""

    def neurons(self) -> list[nn.Module]:
        return [nn.Identity(), nn.Identity()]

    def scan(self, node: Any, x: Tensor) -> Tensor:
        return spikingnerf.lif_scan_padded(x.transpose(0, 1)).transpose(0, 1)


PEERS: dict[str, type[JellyColours]] = {"SpikingJelly": JellyColours, "snnTorch": SnnTorchColours}


def there() -> list[str]:
    """The peers that can be imported."""
    found = []
    for name, kind in PEERS.items():
        try:
            kind(1, 1).neurons()
            found.append(name)
        except ImportError as error:
            print(f"without {name}: {error}")
    return found


def survivors(workload: RadianceWorkload, field: Field, rays: int) -> tuple[Tensor, Tensor, RaySamples]:
    """What the colour network gets of so many rays of the first step."""
    taken: list[Any] = []
    assert field.colours is not None
    hook = field.colours.register_forward_pre_hook(lambda module, given: taken.append(given))
    with torch.no_grad():
        field(Rays(*workload.batches(0, Shard(0, rays, rays))[0].rays))
    hook.remove()
    features, views, found = taken[0]
    return features.detach(), views, found


def head_step(network: SpikingColours, features: Tensor, views: Tensor, found: RaySamples) -> Callable[[], Tensor]:
    """A forward and backward pass."""

    def step() -> Tensor:
        given = features.clone().requires_grad_(True)
        colours = network(given, views, found)[0]
        colours.sum().backward()
        network.zero_grad()
        return colours

    return step


def whole_step(workload: RadianceWorkload, field: Field, rays: int) -> Callable[[], None]:
    """Loss, backward and the optimizer's step, on the rays of the first step again and again; the field moves no
    further."""
    batch = workload.batches(0, Shard(0, rays, rays))[0]
    optimizer = torch.optim.Adam(field.parameters(), lr=0.0, fused=True)

    def step() -> None:
        loss, weight = workload.loss(field, batch)
        optimizer.zero_grad()
        (loss / weight).backward()
        optimizer.step()

    return step


def timed(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def kept_by(step: Callable[[], Any]) -> int:
    """Bytes that a pass keeps for backward, each piece of memory once."""
    kept: dict[int, int] = {}

    def keep(one: Tensor) -> Tensor:
        kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        step()
    return sum(kept.values())


def peak_of(step: Callable[[], Any]) -> int:
    """Bytes of the tensors that a pass allocates, at most at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    now, most = 0, 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
