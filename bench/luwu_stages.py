"""Part of bench/luwu.py: threads that belong to steps beside threads that own layers, on the same O_DIRECT files.

A layer is three extents (parameters and both moments), read, moved by AdamW and written, by three threads in each form:

- `step-centric`: each thread does one thing (read, AdamW, write) to every layer; layers go round in six buffers;
- `layer-centric, teams of one`: each thread takes a layer through all three; three layers are under way;
- `layer-centric, one team`: all three threads work on the same layer, a third each, and wait for each other.

AdamW runs on one thread of torch each: OpenMP's others would spin between two calls, on cores that transfers need.
With a limit each extent is really read or written, then waits until the disk would have done it at that rate; one is
read and one written at a time. (The kernel's limit, `blkio.throttle`, credits the time in which a direction was idle,
which no disk does.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from espalier.store.direct_io import aligned
from espalier.store.generations import Generations
from table import Row, compare, settle

THREADS = 3
ROOMS = 6
LIMITED = 0.1
"""Seconds in which a layer is read, or written, where the disk is limited."""


class Stages:
    """Layers on disk, to be read, moved and written. Has state: the file; `limit`: bytes/s of it each way; 0: none."""

    def __init__(self, path: Path, layers: int, numel: int) -> None:
        self.layers, self.numel, self.step = layers, numel, 0
        names = [f"{one}/{part}" for one in range(layers) for part in range(THREADS)]
        self.state = Generations.create(path, dict.fromkeys(names, 4 * numel))
        self.rooms = [aligned(4 * THREADS * numel) for _ in range(ROOMS)]
        self.limit, self._ways = 0.0, (threading.Lock(), threading.Lock())
        self.gradient = torch.full((numel,), 1e-3)
        for name in names:
            self.state.write(name, self.rooms[0].zero_())
        self.state.commit(0)

    def take(self, way: Callable[[], Sequence[Callable[[], None]]]) -> float:
        """Seconds of a step by the threads of `way`, its commit included."""
        self.step += 1
        threads = [threading.Thread(target=one) for one in way()]
        began = time.perf_counter()
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.state.commit(self.step)
        return time.perf_counter() - began

    def part(self, room: Tensor, part: int) -> Tensor:
        """The memory of an extent in a buffer."""
        return room[4 * self.numel * part : 4 * self.numel * (part + 1)]

    def read(self, layer: int, room: Tensor, parts: Sequence[int] = range(THREADS)) -> None:
        """Extents of a layer."""
        for part in parts:
            self._transfer(0, f"{layer}/{part}", self.part(room, part))

    def write(self, layer: int, room: Tensor, parts: Sequence[int] = range(THREADS)) -> None:
        """Extents of a layer."""
        for part in parts:
            self._transfer(1, f"{layer}/{part}", self.part(room, part))

    def _transfer(self, way: int, name: str, memory: Tensor) -> None:
        move = (self.state.read, self.state.write)[way]
        if not self.limit:
            move(name, memory)
            return
        with self._ways[way]:
            until = time.perf_counter() + memory.nbytes / self.limit
            move(name, memory)
            time.sleep(max(0.0, until - time.perf_counter()))

    def adam(self, room: Tensor, start: int = 0, stop: int | None = None) -> None:
        """On elements of a layer."""
        master, first, second = (self.part(room, one).view(torch.float32)[start:stop] for one in range(THREADS))
        torch._fused_adamw_(
            [master], [self.gradient[start:stop]], [first], [second], [], [torch.ones(())], lr=1e-3, beta1=0.9,
            beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def step_centric(self) -> Sequence[Callable[[], None]]:
        """Three threads, each of which does one thing to every layer."""
        free, read, moved = SimpleQueue[Any](), SimpleQueue[Any](), SimpleQueue[Any]()
        for room in self.rooms:
            free.put(room)

        def reading() -> None:
            for one in range(self.layers):
                room = free.get()
                self.read(one, room)
                read.put((one, room))

        def moving() -> None:
            for _ in range(self.layers):
                one, room = read.get()
                self.adam(room)
                moved.put((one, room))

        def writing() -> None:
            for _ in range(self.layers):
                one, room = moved.get()
                self.write(one, room)
                free.put(room)

        return reading, moving, writing

    def teams_of_one(self) -> Sequence[Callable[[], None]]:
        """Three threads, each of which takes a layer through all that is done to it."""
        left: SimpleQueue[int] = SimpleQueue()
        for one in range(self.layers):
            left.put(one)

        def own(room: Tensor) -> None:
            while True:
                try:
                    one = left.get_nowait()
                except Empty:
                    return
                self.read(one, room)
                self.adam(room)
                self.write(one, room)

        return [lambda room=room: own(room) for room in self.rooms[:THREADS]]  # type: ignore[misc]

    def one_team(self) -> Sequence[Callable[[], None]]:
        """Three threads that share each layer."""
        together, third, room = threading.Barrier(THREADS), -(-self.numel // THREADS), self.rooms[0]

        def own(part: int) -> None:
            for one in range(self.layers):
                self.read(one, room, [part])
                together.wait()
                self.adam(room, part * third, min((part + 1) * third, self.numel))
                together.wait()
                self.write(one, room, [part])

        return [lambda part=part: own(part) for part in range(THREADS)]  # type: ignore[misc]


def stages(numel: int, pairs: int, folder: Path) -> list[Row]:
    """Seconds of a step of 12 layers in each form, as the disk is and where it is the bottleneck."""
    folder.mkdir(parents=True, exist_ok=True)
    made, rows = Stages(folder / "stages", 8, numel), []
    ways = (made.step_centric, made.teams_of_one, made.one_team)
    names = ("layer-centric, teams of one", "layer-centric, one team")
    for made.limit in (0.0, 12 * numel / LIMITED):
        what = f"read and written at {made.limit / 1e6:.0f} MB/s at most" if made.limit else "as the disk is"
        took: list[list[float]] = []
        for _ in range(pairs):
            took.append([])
            for way in ways:
                settle()
                took[-1].append(made.take(way))
        for at, peer in enumerate(names, start=1):
            pair = [(one[0], one[at]) for one in took]
            case = f"step-centric: {made.layers} layers of {12 * numel / 1e6:.2g} MB, {what}"
            rows.append(compare(case, peer, "s", pair, higher_is_better=False))
            print(case, f"{rows[-1].ratio:.2f} of {peer}", flush=True)
    made.state.close()
    return rows
