"""States in host memory: what passes through the device in a step is what would lie there, to the bit."""

import pytest
import torch

from espalier.optim.base import OptimizerGroup
from espalier.shard.offload.host_memory import HostStates

from .test_optimizer import ADAMW, MUON, build, gradients, owned, same, values


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)
@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
def test_a_step_through_buffers_is_the_resident_one(device, options):
    shapes = [(17, 61), (3000,), (64, 64), (24, 40), (24, 40), ()]
    both = [owned(shapes), owned(shapes)]
    for parameters in both:
        for one in parameters:
            one.tensor.data = one.tensor.data.to(device)
    states = HostStates(torch.device(device), chunk=16384)
    plain, ours = build(options, both[0], OptimizerGroup), build(options, both[1], states.group)
    for step in range(4):
        for parameters, optimizer in zip(both, (plain, ours), strict=True):
            gradients(parameters, step)
            optimizer.step(1.0)
    assert all(torch.equal(one.tensor, other.tensor) for one, other in zip(*both, strict=True))
    same(values(ours), values(plain))
    assert states.meter.read()["host"]["read"] > 0
