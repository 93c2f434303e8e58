"""The optimizer on a node of its own, on slow links: LuWu beside FSDP2 and ZeRO-1, and what the node sustains.

    python bench/luwu.py [--quick] [--pairs N] [--json FILE] [--rate 200mbit] [--only links|node|stages]

`links`: four workers with an uplink of 200 Mbit/s each, and a node whose uplink is four times as fast, so that it needs
no aggregator. FSDP2 gathers each block anew in backward (`reshard_after_forward=True`); ZeRO-1 by hand keeps its states
in host memory. Bytes per link and step are those of the interface, headers left out, beside the cost function's.
`node`: one worker that computes nothing pushes and pulls over loopback; its parameters/s beside the least of what the
link, the disk and AdamW sustain alone. `stages`: threads that belong to steps beside threads that own layers, on the
same O_DIRECT files. Needs root (bench/netlab.py).
"""

from __future__ import annotations

import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))
from espalier.config import Adamw
from espalier.optim import adamw
from espalier.optim.base import Owned
from espalier.shard.luwu.base import Layer
from espalier.shard.luwu.client import Client
from espalier.shard.luwu.layout import Job
from espalier.shard.luwu.node import OptimizerNode
from espalier.shard.luwu.state_file import open_state, open_sums
from espalier.store.direct_io import aligned
from espalier.store.generations import Generations
from luwu_rank import Outcome, Task
from netlab import Lab, Shape, first_said
from netlab import rate as rate_of
from table import Row, arguments, compare, publish, settle

WORKERS = 4
OPTIONS = Adamw(learning_rate=1e-3)


class NodeLab(Lab):
    """One host per node; the last node's uplink is as fast as all others together."""

    def _limit(self, space: str, device: str) -> None:
        plain, last = self.shape, self.shape.nodes - 1
        if space == self._hub(last) or device == f"u{last}":
            self.shape = Shape(plain.nodes, plain.hosts, plain.rate * last)
        super()._limit(space, device)
        self.shape = plain


def trained(task: Task, rate: float) -> Outcome:
    """`task` on every host of a lab."""
    shutil.rmtree(task.folder, ignore_errors=True)
    command = [sys.executable, str(Path(__file__).parent / "luwu_rank.py"), msgspec.json.encode(task).decode()]
    with NodeLab(Shape(nodes=WORKERS + 1, hosts=1, rate=rate)) as lab:
        return msgspec.json.decode(first_said(lab.start(command)), type=Outcome)


def links(quick: bool, pairs: int, rate: float, folder: str) -> list[Row]:
    """Tokens/s beside both peers, and bytes per link beside the formula."""
    size: dict[str, Any] = {"depth": 4, "width": 192, "sequence": 64, "steps": 3 if quick else 8, "folder": folder}
    kinds = ("luwu", "luwu int8", "fsdp2", "zero1")
    found: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
    for _ in range(pairs):
        for kind in kinds:
            found[kind].append(trained(Task(kind=kind, **size), rate))
            print(kind, f"{statistics.median(found[kind][-1].seconds):.2f} s a step", flush=True)

    def speeds(kind: str) -> list[float]:
        return [WORKERS * size["sequence"] / statistics.median(one.seconds) for one in found[kind]]

    case = f"{found['luwu'][0].parameters / 1e6:.1f} M parameters, {rate / 1e6:.0f} Mbit/s{', quick' if quick else ''}"
    peers = {"fsdp2": "FSDP2, resharding", "zero1": "ZeRO-1 with states in host memory, by hand"}
    rows = [
        compare(f"{kind}: {case}", name, "tokens/s", list(zip(speeds(kind), speeds(peer), strict=True)))
        for kind in ("luwu int8", "luwu")
        for peer, name in peers.items()
    ]
    for kind in kinds:
        for way in ("sent", "received"):
            pair = [(getattr(one, way), getattr(one, f"expected_{way}")) for one in found[kind]]
            name = f"{kind}: bytes {way} per link and step: {case}"
            rows.append(compare(name, "the formula", "bytes", pair, higher_is_better=False))
    return rows


# --- the node alone ------------------------------------------------------------------------------------------------


def job_of(layers: int, numel: int) -> Job:
    """Equal layers."""
    return Job(tuple(Layer(f"layer {one}", ((f"{one}", (numel // 64, 64)),)) for one in range(layers)), OPTIONS)


def zero(layer: int, flat: torch.Tensor) -> None:
    """The first parameters."""
    flat.zero_()


def node_rate(job: Job, folder: Path, steps: int) -> float:
    """Parameters/s of steps in which a worker pushes every layer and pulls every layer twice."""
    state = open_state(folder, job, zero)
    door = socket.create_server(("127.0.0.1", 0))
    node = OptimizerNode(job, (state, open_sums(folder, job)), door, "bench").start()
    client = Client([[door.getsockname()[:2]]], 0, job, "bench")
    outs = [torch.empty(layer.numel) for layer in job.layers]
    gradient = torch.full((job.layers[0].numel,), 1e-3)
    took = []
    for step in range(steps + 1):
        began = time.perf_counter()
        pulls = [client.pull(number, step, out) for number, out in enumerate(outs)]
        for one in pulls:
            client.wait(one)
        client.move(step, 1.0, 1.0, following=1.0)
        handles = []
        for number, out in enumerate(outs):
            handles += [client.pull(number, step, out), client.push(number, step, gradient)]
        for one in handles:
            client.wait(one)
        client.settle(step + 1)
        took.append(time.perf_counter() - began)
    client.close()
    node.close()
    return sum(layer.numel for layer in job.layers) / statistics.median(took[1:])


def parts(job: Job, folder: Path) -> dict[str, float]:
    """Parameters/s of the link, the disk and AdamW, each alone."""
    layer = job.layers[0]
    size = layer.numel * 12
    with Generations.create(folder / "disk", {str(one): size for one in range(4)}) as state:
        buffer = aligned(size)
        began = time.perf_counter()
        for step in range(2):
            for one in range(4):
                state.write(str(one), buffer)
            state.commit(step)
            for one in range(4):
                state.read(str(one), buffer)
        disk = 8 * layer.numel / (time.perf_counter() - began)
    owned = [Owned("one", torch.nn.Parameter(torch.zeros(layer.numel // 64, 64)), torch.Size((layer.numel // 64, 64)))]
    owned[0].tensor.grad = torch.ones_like(owned[0].tensor)
    optimizer = adamw.build(OPTIONS, owned)
    optimizer.step(1.0)
    began = time.perf_counter()
    for _ in range(4):
        optimizer.step(1.0)
    adam = 4 * layer.numel / (time.perf_counter() - began)
    return {"disk": disk, "adam": adam, "link": loopback(64 * 2**20) / 12}


def loopback(size: int) -> float:
    """Bytes/s of a plain TCP connection on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as one:
        other, _ = door.accept()
        data, room = bytes(size), bytearray(2**20)
        sender = threading.Thread(target=one.sendall, args=(data,))
        began = time.perf_counter()
        sender.start()
        left = size
        while left:
            left -= other.recv_into(room)
        sender.join()
        other.close()
        return size / (time.perf_counter() - began)


def node(quick: bool, pairs: int, folder: Path) -> list[Row]:
    """The node beside the slowest of its parts."""
    job = job_of(6, 2**20 if quick else 4 * 2**20)
    found = []
    for number in range(pairs):
        place = folder / f"node{number}"
        place.mkdir(parents=True)
        rates = parts(job, place)
        settle()
        found.append((node_rate(job, place, 2 if quick else 4), min(rates.values())))
        print({name: f"{value / 1e6:.0f} M/s" for name, value in rates.items()}, flush=True)
        shutil.rmtree(place)
    return [
        compare(
            "a node that one worker keeps busy, over loopback", "least of link, disk and AdamW", "parameters/s", found
        )
    ]


# --- step-centric and layer-centric ------------------------------------------------------------------------------


class Stages:
    """Layers on disk, to be read, stepped and written. Has state: the file."""

    def __init__(self, path: Path, layers: int, numel: int) -> None:
        self.layers, self.numel = layers, numel
        self.state = Generations.create(path, {str(one): 12 * numel for one in range(layers)})
        self.rooms = [aligned(12 * numel) for _ in range(3)]
        for one in range(layers):
            self.state.write(str(one), self.rooms[0].zero_())
        self.state.commit(0)
        self.gradient = torch.full((numel,), 1e-3)

    def adam(self, room: torch.Tensor) -> None:
        """On the state of one layer."""
        whole = room.view(torch.float32)
        values = [whole[at * self.numel : (at + 1) * self.numel] for at in range(3)]
        torch._fused_adamw_(
            [values[0]], [self.gradient], [values[1]], [values[2]], [], [torch.ones(())], lr=1e-3, beta1=0.9,
            beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def layer_centric(self, step: int) -> None:
        """Three threads, each of which takes a layer through all that is done to it."""
        left: SimpleQueue[int] = SimpleQueue()
        for one in range(self.layers):
            left.put(one)

        def own(room: torch.Tensor) -> None:
            while True:
                try:
                    one = left.get_nowait()
                except Empty:
                    return
                self.state.read(str(one), room)
                self.adam(room)
                self.state.write(str(one), room)

        _all([threading.Thread(target=own, args=(room,)) for room in self.rooms])
        self.state.commit(step)

    def step_centric(self, step: int) -> None:
        """Three threads, each of which does one thing to every layer."""
        free, read, moved = SimpleQueue[Any](), SimpleQueue[Any](), SimpleQueue[Any]()
        for room in self.rooms:
            free.put(room)

        def reading() -> None:
            for one in range(self.layers):
                room = free.get()
                self.state.read(str(one), room)
                read.put((one, room))

        def moving() -> None:
            for _ in range(self.layers):
                one, room = read.get()
                self.adam(room)
                moved.put((one, room))

        def writing() -> None:
            for _ in range(self.layers):
                one, room = moved.get()
                self.state.write(str(one), room)
                free.put(room)

        _all([threading.Thread(target=one) for one in (reading, moving, writing)])
        self.state.commit(step)


def _all(threads: Sequence[threading.Thread]) -> None:
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def stages(quick: bool, pairs: int, folder: Path) -> list[Row]:
    """Seconds of a step on the same files, three threads and three buffers each."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Stages(folder / "stages", 12, 2**19 if quick else 2**21)
    found, step = [], 0
    for _ in range(pairs):
        seconds = []
        for way in (made.step_centric, made.layer_centric):
            step += 1
            began = time.perf_counter()
            way(step)
            seconds.append(time.perf_counter() - began)
        found.append((seconds[0], seconds[1]))
    made.state.close()
    return [compare("a step of 12 layers on O_DIRECT files", "layer-centric", "s", found, higher_is_better=False)]


def main() -> int:
    """Measures and prints."""
    given = arguments(
        __doc__ or "",
        rate={"default": "200mbit", "help": "of a worker's uplink, each way"},
        only={"choices": ("links", "node", "stages"), "help": "one part"},
    )
    rows: list[Row] = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="luwu-", dir=Path.cwd()) as made:
        place = Path(made)
        if given.only in (None, "stages"):
            rows += stages(given.quick, given.pairs or (5 if given.quick else 9), place / "stages")
        if given.only in (None, "node"):
            rows += node(given.quick, given.pairs or (3 if given.quick else 5), place)
        if given.only in (None, "links"):
            rows += links(
                given.quick, given.pairs or (1 if given.quick else 5), rate_of(given.rate), str(place / "run")
            )
    publish(rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
