"""Optimizer offload: a torch optimizer whose states wait on disk, and pass through memory extent by extent in a step.

After ZeRO-Infinity (arXiv 2104.07857), section 5.1. It deviates in that nothing else than torch's own step computes,
on pieces of the same parameters: results are those of states in memory, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from espalier.checkpoint.base import StateDict
from espalier.checkpoint.stored_slice import StoredSlice
from espalier.checkpoint.tensor_slice import Slice
from espalier.mechanisms.offload.state_file import DiskTier, ExtentJob, StateFile, States, TransferMeter
from espalier.optim.base import Owned, StateKinds, set_rates
from espalier.plan.axes.offload_layout import CHUNK, Elements, StateExtent, StatePiece, extents
from espalier.recipe.errors import UserError
from espalier.store.io_queue import IoQueue

WAITING = 1024
"""Pieces of transfers that may wait for the disk: memory is bounded by the buffers."""


class StateFolder:
    """Where the states of this process wait. Has state: the queue, and the number of files.

    Attributes:
        tier: what transfers go through; meter: what counts them.
        resident: bytes of states that stay in memory, of files that are made from now on (ZeRO-Offload++'s ratio).
        chunk: bytes of an extent at most.
        device: what moves the states.
        through: what brings extents to that device.
    """

    device = torch.device("cpu")
    resident = 0

    def __init__(
        self, folder: Path, name: str, chunk: int = CHUNK, through: Callable[[StateFile], States] = lambda file: file
    ) -> None:
        self._folder, self._name, self._count, self._through = folder, name, 0, through
        self.meter = TransferMeter("disk")
        self.chunk = chunk
        self.tier = DiskTier(IoQueue(WAITING), self.meter, ThreadPoolExecutor(2, "checksums"))

    def group(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned], kinds: StateKinds) -> OffloadedGroup:
        chunk = self.chunk if kinds.batches is None else None
        return OffloadedGroup(optimizer, owned, kinds, self.file(owned, lay_out(owned, len(kinds.shaped), chunk)))

    def file(self, owned: Sequence[Owned], laid_out: Sequence[StateExtent], fixed_rows: int = 0) -> States:
        """A new file for extents of `owned`; `fixed_rows`: rows that steps only read."""
        self._count += 1
        path = self._folder / f"{self._name}-{self._count}.states"
        names = [owned[extent.pieces[0].number].name for extent in laid_out]
        made = StateFile(path, laid_out, names, self.tier._replace(resident=self.resident), fixed_rows)
        self.resident -= made.resident_bytes
        return self._through(made)


def lay_out(owned: Sequence[Owned], rows: int, chunk: int | None) -> list[StateExtent]:
    """Extents of `owned`; parameters of one dtype follow one another. Raises UserError for one with gaps."""
    for parameter in owned:
        if not parameter.tensor.is_contiguous():
            raise UserError(
                f"The optimizer state of {parameter.name!r} cannot be offloaded.",
                why=f"its parameter has strides {parameter.tensor.stride()} for its shape "
                f"{tuple(parameter.tensor.shape)}",
                do="make the parameter contiguous, or plan.pin.offload=none",
            )
    laid_out: list[StateExtent] = []
    for dtype in dict.fromkeys(parameter.tensor.dtype for parameter in owned):
        sizes = [
            (number, parameter.tensor.numel())
            for number, parameter in enumerate(owned)
            if parameter.tensor.dtype == dtype
        ]
        offset = laid_out[-1].offset + laid_out[-1].bytes if laid_out else 0
        laid_out += extents(Elements(sizes, dtype.itemsize), rows, chunk, offset)
    return laid_out


class OffloadedGroup:
    """One torch optimizer over named parameters, like `optim.base.OptimizerGroup`. Has state: a file.

    Args:
        optimizer: has the parameters, and no state.
        owned, kinds: the parameters, and what is kept of each.
        file: where that is.
    """

    before = 0
    """Rows of an extent that come before the states."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned], kinds: StateKinds, file: States
    ) -> None:
        self.optimizer, self.owned, self._kinds, self.file = optimizer, owned, kinds, file
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        places = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        self._group_of = [places[id(parameter.tensor)] for parameter in owned]
        self._counts: list[dict[str, Tensor]] = [
            {kind: torch.zeros((), dtype=torch.float32, device=parameter.tensor.device) for kind in kinds.counted}
            for parameter in owned
        ]

    # --- a step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update, each group's rate times `factor`."""
        set_rates(self.optimizer, self.rates, factor)
        with beside_transfers() if self._kinds.batches is None else nullcontext():
            self._walk()

    def _walk(self) -> None:
        jobs = self.jobs()
        groups = [group["params"] for group in self.optimizer.param_groups]
        for job, rows in zip(jobs, self.file.walk(jobs), strict=True):
            for group in self.optimizer.param_groups:
                group["params"] = []
            made = [pair for extent, values in zip(job, rows, strict=True) for pair in self._given(extent, values)]
            self.optimizer.step()
            for piece, state in made:
                if piece.stop == self.owned[piece.number].tensor.numel():
                    self._counts[piece.number] = {kind: state[kind] for kind in self._kinds.counted}
            self.optimizer.state.clear()
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = parameters

    def jobs(self) -> list[ExtentJob]:
        """What is computed together, of parameters that have a gradient."""
        moving = [parameter.tensor.grad is not None for parameter in self.owned]
        moving_extents = [
            extent for extent in self.file.extents if any(moving[piece.number] for piece in extent.pieces)
        ]
        if self._kinds.batches is None:
            return [(extent,) for extent in moving_extents]
        shapes = [self.owned[extent.pieces[0].number].tensor.shape for extent in moving_extents]
        return [tuple(moving_extents[index] for index in batch) for batch in self._kinds.batches(shapes)]

    def piece(self, piece: StatePiece, rows: Tensor) -> nn.Parameter | None:
        """A piece as the optimizer takes it, with its gradient; None: it has none."""
        whole = self.owned[piece.number].tensor
        if whole.grad is None:
            return None
        part = nn.Parameter(_cut(whole, piece))
        part.grad = _cut(whole.grad, piece)
        return part

    def _given(self, extent: StateExtent, values: Tensor) -> Iterator[tuple[StatePiece, dict[str, Tensor]]]:
        """Gives the optimizer the pieces of an extent, with their states in `values`."""
        for piece in extent.pieces:
            dtype = self.owned[piece.number].tensor.dtype
            rows = values[:, : extent.used].view(dtype)[:, piece.at : piece.at + piece.stop - piece.start]
            part = self.piece(piece, rows)
            if part is None:
                continue
            state = {kind: count.clone() for kind, count in self._counts[piece.number].items()}
            shaped = zip(self._kinds.shaped, rows[self.before :], strict=True)
            state |= {kind: row.view(part.shape) for kind, row in shaped}
            self.optimizer.state[part] = state
            self.optimizer.param_groups[self._group_of[piece.number]]["params"].append(part)
            yield piece, state

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """`name/kind` -> tensor, or what reads and writes it piece by piece."""
        tensors: dict[str, Any] = {}
        for number, (parameter, counts) in enumerate(zip(self.owned, self._counts, strict=True)):
            tensors |= {f"{parameter.name}/{kind}": value for kind, value in counts.items()}
            for row, kind in enumerate(self._kinds.shaped, self.before):
                tensors[f"{parameter.name}/{kind}"] = self.stored(number, row)
        return tensors

    def stored(self, number: int, row: int) -> StoredSlice:
        """A row of one parameter."""
        tensor = self.owned[number].tensor
        places = self._places[number]
        local = torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
        return StoredSlice(local, tensor.shape, 0, stored=StoredState(self.file, places, row, tensor.dtype))

    @cached_property
    def _places(self) -> list[list[_Place]]:
        """Where each parameter is."""
        places: list[list[_Place]] = [[] for _ in self.owned]
        for extent in self.file.extents:
            for piece in extent.pieces:
                places[piece.number].append(_Place(extent, piece))
        return places

    def load_state_dict(self, state: StateDict) -> None:
        """Copies `state` into the file; what was read into the file is there."""
        for key, target in self.state_dict().items():
            source = state[key]
            if isinstance(target, StoredSlice):
                target.take(source)
            else:
                target.copy_(source.local.view(()) if isinstance(source, Slice) else source)


@contextmanager
def beside_transfers() -> Iterator[None]:
    """Half of torch's threads: they would spin between extents, while transfers and checksums wait for a processor. One
    thread moves 5 GB/s of states, more than a disk reads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Place(NamedTuple):
    """Where elements of a parameter are."""

    extent: StateExtent
    piece: StatePiece


class StoredState:
    """One kind of state of one parameter in a file. See `checkpoint.stored_slice.Stored`."""

    def __init__(self, file: States, places: Sequence[_Place], row: int, dtype: torch.dtype) -> None:
        self._file, self._places, self._row, self._dtype = file, places, row, dtype

    @property
    def cuts(self) -> list[int]:
        """Elements at which a piece that is read at once begins."""
        return [piece.start for _, piece in self._places]

    def read(self, start: int, out: Tensor) -> None:
        """Fills `out` with elements from `start` on."""
        for values, first, last in self._parts(start, start + out.numel(), change=False):
            out[first - start : last - start].copy_(values)

    def write(self, start: int, values: Tensor) -> None:
        """Puts `values` there."""
        for room, first, last in self._parts(start, start + values.numel(), change=True):
            room.copy_(values[first - start : last - start])

    def _parts(self, start: int, stop: int, change: bool) -> Iterator[tuple[Tensor, int, int]]:
        """(values, first, last) of each piece of elements `[start, stop)`."""
        for extent, piece in self._places:
            first = max(start, piece.start)
            last = min(stop, piece.stop)
            if first < last:
                row = self._file.row(extent, self._row, change)[: extent.used].view(self._dtype)
                at = piece.at - piece.start
                yield row[at + first : at + last], first, last


def _cut(tensor: Tensor, piece: StatePiece) -> Tensor:
    """The elements of a piece: with the tensor's own shape where it is all of it."""
    if piece.stop - piece.start == tensor.numel():
        return tensor.detach()
    return tensor.detach().reshape(-1)[piece.start : piece.stop]
