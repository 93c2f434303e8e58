"""What runs for a GPU, on fake CUDA tensors and streams that are recorded: devices, bytes, and no race between copies
and computation, whatever the GPU's pace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.mechanisms.offload.test_optimizer import ADAMW
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from espalier.kernels import accelerator
from espalier.mechanisms.offload.activations import HostPlaces
from espalier.mechanisms.offload.host_memory import CudaStreams, DeviceFile, HostStates, HostWeights
from espalier.mechanisms.offload.parameters import OffloadNode
from espalier.optim import adamw
from espalier.optim.base import Owned
from espalier.plan.axes.node_layout import FlatLayer
from espalier.plan.axes.offload_layout import Elements, extents

CUDA, HOST = torch.device("cuda", 0), "host"
SHAPES = [(17, 61), (3000,), (64, 64), (24, 40), (24, 40)]


@dataclass
class Race(TorchDispatchMode):
    """Vector clocks of the host and of streams: two accesses of the same bytes, one of which writes, must be ordered.

    Copies of CUDA tensors, which a build without CUDA cannot do even fakely, end here; `copied` counts their bytes.
    """

    now: dict[str, dict[str, int]] = field(default_factory=lambda: {HOST: {HOST: 0}})
    stream: str = "compute"
    seen: dict[int, list[tuple[int, int, bool, str, int]]] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    copied: dict[str, int] = field(default_factory=lambda: {"to": 0, "back": 0})
    events: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        super().__init__()

    def joined(self, waits: str, other: str) -> None:
        """What `waits` does from now on comes after all that `other` was given."""
        own, others = self.clock(waits), self.clock(other)
        for name, count in others.items():
            own[name] = max(own.get(name, 0), count)

    def clock(self, name: str) -> dict[str, int]:
        return self.now.setdefault(name, {name: 0})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        copies = func is torch.ops.aten.copy_.default
        on_device = any(one.device.type == "cuda" for one in tensors)
        if not func.is_view and func.namespace == "aten":
            actor = self.stream if on_device else HOST
            if on_device:
                self.joined(actor, HOST)  # it is begun now, or later
            for number, one in enumerate(tensors):
                self.access(one, "fused" in str(func) or (number == 0 and func._schema.is_mutable), actor)
        if not (copies and on_device):
            return func(*args, **(kwargs or {}))
        to, source, beside = args
        if not beside:
            self.joined(HOST, self.stream)  # a plain copy returns when it is done
        assert (to.shape, to.dtype) == (source.shape, source.dtype)
        if to.device != source.device:
            self.copied["to" if to.device.type == "cuda" else "back"] += to.nbytes
        return to

    def access(self, tensor: torch.Tensor, writes: bool, actor: str) -> None:
        if not tensor.numel():
            return
        clock = self.clock(actor)
        clock[actor] = clock.get(actor, 0) + 1
        first = tensor.storage_offset() * tensor.itemsize
        last = (
            first + (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.itemsize
        )
        storage = tensor.untyped_storage()
        self.kept.append(storage)  # its address is of nothing else meanwhile
        before = self.seen.setdefault(storage._cdata, [])
        for start, stop, wrote, by, when in before:
            if start < last and first < stop and (writes or wrote) and by != actor:
                assert clock.get(by, 0) >= when, f"{actor} and {by} use bytes {first} to {last} at once"
        before.append((first, last, writes, actor, clock[actor]))


class NoGuard(TorchFunctionMode):
    """Calls operators directly where torch's Python functions first ask for a guard of the device: a build without CUDA
    has none, fake tensors or not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__ and args[0].device.type == "cuda":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            found, dim = args[0], 0
            for one in index:
                if isinstance(one, slice):
                    found = torch.ops.aten.slice.Tensor(found, dim, one.start, one.stop)
                    dim += 1
                else:
                    found = torch.ops.aten.select.int(found, dim, one)
            return found
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, kwargs.get("non_blocking", False))
        return func(*args, **kwargs)


class FakeStream:
    """Of an accelerator, for a Race; in its block it is the current one."""

    def __init__(self, race: Race, name: str) -> None:
        self.race, self.name = race, name

    def wait_stream(self, other: FakeStream) -> None:
        self.race.joined(self.name, other.name)

    def record_event(self) -> str:
        event = f"event {next(self.race.events)}"
        self.race.joined(event, self.name)
        return event

    def wait_event(self, event: str) -> None:
        self.race.joined(self.name, event)

    def synchronize(self) -> None:
        self.race.joined(HOST, self.name)

    def __enter__(self) -> None:
        self.before, self.race.stream = self.race.stream, self.name

    def __exit__(self, *_: object) -> None:
        self.race.stream = self.before


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    race = Race()
    names = iter(f"copies {number}" for number in range(100))

    monkeypatch.setattr(accelerator, "stream", lambda device: FakeStream(race, next(names)))
    monkeypatch.setattr(accelerator, "current_stream", lambda device: FakeStream(race, race.stream))
    with FakeTensorMode(), race, NoGuard():
        yield race


def optimizer_on(states: HostStates) -> Any:
    held = [
        Owned(f"p{n}", nn.Parameter(torch.zeros(shape, device=CUDA)), torch.Size(shape))
        for n, shape in enumerate(SHAPES)
    ]
    for one in held:
        one.tensor.grad = torch.ones(one.shape, device=CUDA)
    return adamw.build(ADAMW, held, states.group)


def steps_of_states(race: Race) -> None:
    """Steps, and between them what a checkpoint reads."""
    states = HostStates(CUDA, chunk=16384)
    optimizer = optimizer_on(states)
    for _ in range(2):
        optimizer.step(1.0)
        file, told = optimizer.file, states.meter.read()["host"]
        assert race.copied == {"to": told["read"], "back": told["written"]}
        assert min(race.copied.values()) > 65536
        race.copied.update(to=0, back=0)
        assert file.row(file.extents[0], 0).add(1).device.type == "cpu"


def steps_of_layers(race: Race) -> None:
    """Layers pulled one ahead of their use, gradients pushed, a step."""
    layers = [FlatLayer(f"l{number}", ((f"l{number}.w", (40, 30)), (f"l{number}.b", (7,)))) for number in range(3)]
    node = OffloadNode(layers, ADAMW, lambda index, flat: flat.zero_(), HostStates(CUDA, 16384))
    for step in range(2):
        rooms = [torch.empty(one.numel, device=CUDA) for one in layers]
        arriving = [node.pull(0, step, rooms[0])]
        for index, room in enumerate(rooms):
            arriving += [node.pull(index + 1, step, rooms[index + 1])] if index + 1 < len(rooms) else []
            node.wait(arriving[index])
            gradient = room.sin()
            written = node.push(index, step, gradient)
            node.wait(written)
            gradient.zero_()
        node.totals(step, torch.zeros(1, device=CUDA))
        node.move(step, 0.5, 1.0)


def activations(race: Race) -> None:
    """Of two blocks, in places that are used again."""
    places = HostPlaces(CUDA)
    for _ in range(2):
        given = [torch.ones(1024, device=CUDA) for _ in range(2)]
        for number, one in enumerate(given):
            places.write(4096 * number, one)()
            one.zero_()
        reads = [places.read(4096 * number, 4096) for number in (1, 0)]
        for done, buffer in reads:
            done()
            buffer.view(torch.float32).sum()


class Extents:
    """Stands for a state file: its buffers are read and written by the host."""

    def __init__(self, extent: Any) -> None:
        self.extents, self.row, self.settle = [extent], None, None
        self.buffers = [torch.zeros(extent.rows, extent.row_bytes, dtype=torch.uint8) for _ in range(3)]

    def walk(self, jobs: Any) -> Any:
        for number, _ in enumerate(jobs):
            view = self.buffers[number % 3]
            view.fill_(1)  # is read
            yield [view]
            view.add_(0)  # is written

    def fetch(self, extent: Any, row: int, out: torch.Tensor) -> Any:
        out.fill_(1.0)
        return lambda: None

    def store(self, extent: Any, row: int, values: torch.Tensor) -> Any:
        values.add_(0)
        return lambda: None


def steps_of_a_file(race: Race) -> None:
    """States on disk, which pass through the host."""
    (extent,) = extents(Elements([(0, 4096)], 4), 2)
    file = DeviceFile(Extents(extent), CUDA)  # type: ignore[arg-type]
    for _ in range(2):
        for given in file.walk([(extent,)] * 5):
            given[0].add_(1)
        out = torch.empty(4096, device=CUDA)
        file.fetch(extent, 0, out)()
        file.store(extent, 0, out.sin())()


def frozen_blocks(race: Race) -> None:
    """Frozen weights of three blocks, read one ahead of their use into two rooms; what sums them goes beside."""
    weights = HostWeights(CUDA)
    waiting = [weights.keep(torch.ones(1024)) for _ in range(3)]
    rooms = [torch.empty(1024, device=CUDA) for _ in range(2)]
    arrived = weights.fetch(waiting[0], rooms[0])
    for number in range(1, 4):
        ahead = weights.fetch(waiting[number % 3], rooms[number % 2])
        arrived()
        assert race.clock("compute").get("copies 0", 0) < race.clock("copies 0")["copies 0"], "the next is on its way"
        rooms[(number - 1) % 2].sin()
        arrived = ahead
    with weights.after_copies():
        rooms[1].cos()
    weights.fetch(waiting[0], rooms[1])
    assert weights.meter.read()["host"]["read"] == race.copied["to"] == 5 * 4096


WORK = [steps_of_states, steps_of_layers, activations, steps_of_a_file, frozen_blocks]


@pytest.mark.parametrize("work", WORK)
def test_what_a_gpu_does_is_on_its_device_and_has_no_race(work, monkeypatch):
    with fake_cuda(monkeypatch) as race:
        work(race)
    assert {"compute", "copies 0"} <= race.now.keys()


LOST = [(work, lost) for work in WORK[:-1] for lost in ("wait", "beside")]
LOST += [(steps_of_states, "finish"), (steps_of_a_file, "finish")]
LOST += [(frozen_blocks, "mark"), (frozen_blocks, "beside")]


@pytest.mark.parametrize(("work", "lost"), LOST)
def test_a_wait_that_is_left_out_is_a_race(work, lost, monkeypatch):
    """Each of them is needed, and the test above would notice."""

    @contextmanager
    def unordered(self, way):  # type: ignore[no-untyped-def]
        with self._streams[way]:
            yield

    nothing = {"beside": unordered, "mark": lambda *_: lambda: None}
    monkeypatch.setattr(CudaStreams, lost, nothing.get(lost, lambda *_: None))
    with fake_cuda(monkeypatch) as race, pytest.raises(AssertionError, match="at once"):
        work(race)
