"""States in host memory: what passes through the device in a step is what would lie there, to the bit."""

from contextlib import contextmanager

import pytest
import torch
from tests.mechanisms.offload.test_optimizer import ADAMW, MUON, build, gradients, owned, same, values

from espalier.mechanisms.offload.activations import FilePlaces, HostPlaces
from espalier.mechanisms.offload.host_memory import DeviceFile, HostMemory, HostStates, Streams
from espalier.mechanisms.offload.optimizer import StateFolder
from espalier.mechanisms.offload.parameters import OffloadNode
from espalier.mechanisms.offload.state_file import TransferMeter
from espalier.optim.base import OptimizerGroup
from espalier.plan.axes.node_layout import FlatLayer
from espalier.plan.axes.offload_layout import Elements, extents

DEVICES = pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))],
)


@DEVICES
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


# --- parameters and activations --------------------------------------------------------------------------------------


def moved(folder, device, steps=2):
    """Values of two layers after so many steps, as they are pulled."""
    layers = [FlatLayer(f"l{number}", ((f"l{number}.w", (40, 30)), (f"l{number}.b", (7,)))) for number in range(2)]
    node = OffloadNode(layers, ADAMW, lambda index, flat: flat.copy_(torch.arange(flat.numel()) / 100 + index), folder)
    for step in range(steps):
        for index, layer in enumerate(layers):
            values = torch.empty(layer.numel, device=device)
            node.wait(node.pull(index, step, values))
            node.wait(node.push(index, step, values.sin()))
        node.totals(step, torch.zeros(1))
        node.move(step, 0.5, 1.0)
    found = [torch.empty(layer.numel, device=device) for layer in layers]
    for index, out in enumerate(found):
        node.wait(node.pull(index, steps, out))
    return [one.cpu() for one in found]


@DEVICES
def test_layers_of_a_device_move_as_those_of_a_processor(device, tmp_path):
    plain = moved(StateFolder(tmp_path, "plain", 16384), "cpu")
    folder = StateFolder(tmp_path, "device", 16384, lambda file: DeviceFile(file, torch.device(device)))
    folder.device = torch.device(device)
    close = {"cpu": torch.equal, "cuda": torch.allclose}[device]
    for states in (HostStates(torch.device(device), 16384), folder):
        assert all(close(one, other) for one, other in zip(moved(states, device), plain, strict=True))


def test_a_layer_is_used_after_its_copy_and_its_gradient_is_kept_until_it_was_copied(tmp_path):
    streams = Recorded()
    layers = [FlatLayer("l", (("l.w", (64,)),))]
    node = OffloadNode(layers, ADAMW, lambda index, flat: flat.zero_(), HostStates(torch.device("cpu"), 8192, streams))
    streams.told.clear()
    arriving = node.pull(0, 0, torch.empty(64))
    streams.told.append("compute")
    node.wait(arriving)
    node.wait(node.push(0, 0, torch.ones(64)))
    assert streams.told == ["in", "compute", "wait", "out", "wait"]
    streams.told.clear()
    node.move(0, 1.0, 1.0)
    assert streams.told == ["in", "wait", "out", "finish"]
    file = DeviceFile(
        StateFolder(tmp_path, "f").file(node.group.owned, node.file.extents), torch.device("cpu"), streams
    )
    extent, streams.told = node.file.extents[0], []
    done = file.store(extent, 0, torch.ones(64))
    assert streams.told == ["out", "finish"]  # before it is written
    done()
    out = torch.empty(64)
    there = file.fetch(extent, 0, out)
    assert streams.told == ["out", "finish"]
    there()
    assert streams.told == ["out", "finish", "in", "wait"]  # after it was read
    assert torch.equal(out, torch.ones(64))


@DEVICES
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_activations_come_back_as_they_were(device, tier, tmp_path):
    where = torch.device(device)
    places = HostPlaces(where) if tier == "host" else FilePlaces(tmp_path / "activations", where)
    given = [torch.randn(size, device=where) for size in (1500, 1024, 1)]
    for offset, one in zip((0, 8192, 16384), given, strict=True):
        places.write(offset, one)()
    for offset, one in zip((0, 8192, 16384), given, strict=True):
        done, buffer = places.read(offset, -(-one.nbytes // 4096) * 4096)
        done()
        assert torch.equal(buffer.view(torch.float32)[: one.numel()], one)


def test_activations_are_copied_beside_computation():
    streams = Recorded()
    places = HostPlaces(torch.device("cpu"), streams)
    written = places.write(0, torch.ones(10))
    streams.told.append("compute")
    written()
    read, _ = places.read(0, 4096)
    streams.told.append("compute")
    read()
    assert streams.told == ["out", "compute", "wait", "in", "compute", "wait"]
