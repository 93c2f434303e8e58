"""Rounds of local steps (Local SGD, SlowMo, DiLoCo) of a worker that holds a few layers, with the outer model on nodes.

In a round every worker takes AdamW steps of its own, on parameters and moments that lie in a file of its own disk and
pass through the same window of layers. Then it pushes, layer by layer, how far it went, the nodes move the outer
parameters by the mean, and it pulls these. So a worker's link carries S up and S down in a round, in place of S up and
2 S down in every step.

The file has two generations: the round's beginning, and, committed before anything is pushed, its end. A worker that
was killed makes its round again, or, where the nodes have ended that, takes their parameters in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.comm.base import Traffic
from espalier.mechanisms.optimizer_node.chunk_update import update
from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.state_file import ChunkState, open_state, open_sums
from espalier.parallel.layer_client import StepLost, step_lost
from espalier.plan.axes.node_cost import PUSHES
from espalier.recipe.errors import UserError
from espalier.store.direct_io import aligned

_CLOCK = "clock"
"""Entry: the worker's own steps, and the step of the run."""


@dataclass(frozen=True)
class LocalRound:
    """Of a worker: its local `steps`, of `every` steps of the run; and its `weight` in the mean."""

    steps: int
    every: int
    weight: float = 1.0


class LocalSteps:
    """See `base.Client`: a worker's own model, and every so often the nodes'. Has state: files, a thread, the client.

    Args:
        outer: the way to the nodes, which hold the outer parameters: its steps are rounds.
        folder: for its files.
        round: how long rounds are.

    Attributes:
        step: of its own that were made.
        run: steps of the run at the beginning of this round.
    """

    def __init__(self, outer: Client, folder: Path, round: LocalRound) -> None:
        self.outer = outer
        self.job = replace(outer.job, outer=None)
        self.round = round
        outer.pushed_as = Traffic.OUTER_STEP
        self._chunks = self.job.chunks
        sizes = {f"{chunk.name}/outer": 4 * chunk.elements for chunk in self.job.all_chunks}
        sizes[_CLOCK] = 16
        self._state = open_state(folder, self.job, lambda _, flat: flat.zero_(), sizes)
        self._sums = open_sums(folder, self.job)
        self._buffers = ChunkState(self.job.largest)
        self._norms: dict[int, list[Tensor]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="local steps")
        self._moved = (0.0, 0)
        self._meet()

    def _meet(self) -> None:
        """Begins the nodes' round. Raises UserError where this worker's files are further on."""
        rounds = self.outer.step
        generation = self._state.step
        if not self._state.written(_CLOCK):
            self.step, self.run = 0, rounds * self.round.every
            self._take(rounds)
            return
        if generation > 2 * rounds + 1:
            raise UserError(
                f"The files of this worker in {self._state.path.parent} are of round {generation // 2}, and "
                f"those of the optimizer nodes of round {rounds}.",
                do="put back the nodes' files, or start a new run with --run FOLDER",
            )
        if generation == 2 * rounds + 1:
            self._state.revert()  # nobody has what it would push: the round is made again
        self._read_clock()
        if generation < 2 * rounds:
            missed = rounds - (generation + 1) // 2
            self.run += missed * self.round.every
            self._take(rounds)

    # What a worker does with layers

    def pull(self, layer: int, step: int, out: Tensor) -> Future[None]:
        """Begins to read a layer of the worker's own parameters."""
        return self._pool.submit(self._read, layer, "parameters", out)

    def push(self, layer: int, step: int, tensor: Tensor) -> Future[None]:
        """Begins to write a layer's gradient."""
        self._norms[layer] = [torch.linalg.vector_norm(view) for view in self.job.layers[layer].views(tensor)]
        return self._pool.submit(self._keep, layer, tensor)

    def _keep(self, layer: int, gradient: Tensor) -> None:
        for chunk in self._chunks[layer]:
            self._sums.write(chunk.name, gradient[chunk.start : chunk.stop])

    def _read(self, layer: int, kind: str, out: Tensor) -> None:
        for chunk in self._chunks[layer]:
            self._state.read(f"{chunk.name}/{kind}", out[chunk.start : chunk.stop], pending=True)

    def wait(self, handle: Future[None]) -> None:
        """Returns when it is done."""
        handle.result()

    def totals(self, step: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """This worker's own."""
        norms = [norm for layer in range(len(self._chunks)) for norm in self._norms[layer]]
        self._norms.clear()
        return values, torch.stack(norms)

    def move(self, step: int, scale: float, rate: float, following: float | None = None) -> None:
        """One step of this worker's AdamW."""
        for chunk in self.job.all_chunks:
            self._buffers.open(chunk)
            self._buffers.read(self._state, pending=True)
            gradient = self._buffers.gradient[: chunk.elements]
            self._sums.read(chunk.name, gradient, pending=True)
            if scale != 1.0:
                gradient *= scale
            update(self.job, self._buffers, self.step, rate)
            self._buffers.write(self._state)
        self.step += 1

    def ended(self, step: int) -> tuple[Tensor, Tensor]:
        """Nothing ends a step but `move`."""
        raise step_lost(self.step)

    def recover(self) -> int:
        """The files are of this process: no step of it is lost."""
        return self.step

    def settle(self, step: int) -> None:
        """Rounds are whole when they end."""

    def close(self, leave: bool = True) -> None:
        self.outer.close(leave)
        self._pool.shutdown()
        self._state.close()

    # The end of a round

    def end_round(self, run: int, rate: float, stop: bool) -> bool:
        """Gives the nodes what this worker did, and goes on from what all did. Returns whether some worker stops.

        `run`: steps of the run at the end of this round; `rate`: of the worker's last step, with its factor.
        """
        begun = time.perf_counter()
        rounds = self.outer.step
        self.run = run
        self._write_clock()
        self._state.commit(2 * rounds + 1)
        sums: Tensor | None = None
        while True:
            try:
                if self.outer.step == rounds:
                    sums = self._give(rounds, rate, stop)
                self._take(rounds + 1)
                break
            except StepLost:
                if self.outer.recover() == rounds + 1 and sums is None:
                    sums = self.outer.ended(rounds)[0]
        stalled, moved = self._moved
        size = sum(4 * layer.numel for layer in self.job.layers)
        self._moved = stalled + time.perf_counter() - begun, moved + size
        return sums is not None and bool(sums[2] > 0)

    def _give(self, rounds: int, rate: float, stop: bool) -> Tensor:
        """Pushes how far this worker went, from the last layer to the first. Returns (weight, rate x weight, those who
        stop) of all."""
        pending: deque[Any] = deque()
        for layer in reversed(range(len(self._chunks))):
            while len(pending) >= PUSHES:
                self.outer.wait(pending.popleft())
            pending.append(self.outer.push(layer, rounds, self._difference(layer)))
        for handle in pending:
            self.outer.wait(handle)
        weight = self.round.weight
        mine = torch.tensor([weight, weight * rate, float(stop)], dtype=torch.float64)
        sums, _ = self.outer.totals(rounds, mine)
        self.outer.move(rounds, 1.0 / float(sums[0]), float(sums[1]) / float(sums[0]))
        return sums

    def _difference(self, layer: int) -> Tensor:
        """[numel] the outer parameters minus this worker's, times its weight."""
        difference = torch.empty(self.job.layers[layer].numel)
        self._read(layer, "outer", difference)
        for chunk in self._chunks[layer]:
            parameters = self._buffers.gradient[: chunk.elements]
            self._state.read(f"{chunk.name}/parameters", parameters, pending=True)
            difference[chunk.start : chunk.stop] -= parameters
        return difference.mul_(self.round.weight) if self.round.weight != 1.0 else difference

    def _take(self, rounds: int) -> None:
        """The nodes' parameters are this worker's, and the beginning of round `rounds`."""
        pulls: deque[tuple[int, Tensor, Any]] = deque()
        for number, layer in enumerate(self.job.layers):
            if len(pulls) == PUSHES:
                self._store(*pulls.popleft())
            values = torch.empty(layer.numel)
            pulls.append((number, values, self.outer.pull(number, rounds, values)))
        while pulls:
            self._store(*pulls.popleft())
        self._write_clock()
        self._state.commit(2 * rounds)

    def _store(self, layer: int, values: Tensor, pull: Any) -> None:
        self.outer.wait(pull)
        for chunk in self._chunks[layer]:
            for kind in ("parameters", "outer"):
                self._state.write(f"{chunk.name}/{kind}", values[chunk.start : chunk.stop])

    def _write_clock(self) -> None:
        self._state.write(_CLOCK, torch.tensor([self.step, self.run]))

    def _read_clock(self) -> None:
        clock = aligned(16)
        self._state.read(_CLOCK, clock)
        self.step, self.run = clock[:16].view(torch.int64).tolist()

    def read(self) -> Mapping[str, float]:
        """Seconds `stalled` in exchanges with the nodes, bytes `pulled` and `pushed`, and those of their disks."""
        (stalled, moved), self._moved = self._moved, (0.0, 0)
        return {"stalled": stalled, "pulled": moved, "pushed": moved, **self.outer.read()}
