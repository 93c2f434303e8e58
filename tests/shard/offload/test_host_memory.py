"""States in host memory: what passes through the device in a step is what would lie there, to the bit."""

from contextlib import contextmanager

import pytest
import torch

from espalier.optim.base import OptimizerGroup
from espalier.shard.offload.host_memory import DeviceFile, HostMemory, HostStates, Streams
from espalier.shard.offload.layout import Elements, extents
from espalier.shard.offload.optimizer import StateFolder
from espalier.shard.offload.state_file import TransferMeter

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


class Recorded(Streams):
    """Streams that write down what they are asked, in order; copies happen at once."""

    def __init__(self):
        self.told = []

    @contextmanager
    def beside(self, way):
        self.told.append(("in", "out")[way])
        yield

    def wait(self, way):
        self.told.append("wait")

    def finish(self):
        self.told.append("finish")


def test_copies_of_the_next_extent_are_begun_before_this_one_is_computed():
    found = extents(Elements([(0, 4096), (1, 4096), (2, 4096)], 4), 2, chunk=32768)
    streams = Recorded()
    memory = HostMemory(found, torch.device("cpu"), TransferMeter("host"), streams)
    for _ in memory.walk([(one,) for one in found]):
        streams.told.append("compute")
    each = ["wait", "in", "compute", "out"]
    assert streams.told == ["in", *each, *each, "wait", "compute", "out", "finish"]


@pytest.mark.parametrize("options", [ADAMW, MUON], ids=["adamw", "muon"])
def test_a_step_of_a_device_with_states_on_disk_is_the_resident_one(options, tmp_path):
    shapes = [(17, 61), (3000,), (64, 64), (24, 40), (24, 40), ()]
    both = [owned(shapes), owned(shapes)]
    streams = Recorded()

    def through(file):
        return DeviceFile(file, torch.device("cpu"), streams)

    states = StateFolder(tmp_path, "rank0", 16384, through)
    plain, ours = build(options, both[0], OptimizerGroup), build(options, both[1], states.group)
    for step in range(3):
        for parameters, optimizer in zip(both, (plain, ours), strict=True):
            gradients(parameters, step)
            optimizer.step(1.0)
    assert all(torch.equal(one.tensor, other.tensor) for one, other in zip(*both, strict=True))
    same(values(ours), values(plain))
    assert streams.told[:4] == ["in", "wait", "out", "finish"]  # back in host memory before it is written
