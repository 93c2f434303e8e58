"""Traces of DRAM requests as text, as DRAMsim3 reads them: an address, READ or WRITE, and a cycle on each line."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from espalier.errors import UserError
from espalier.quant.mega.dram import Array, Device, Served, serve

KINDS = {"READ": False, "WRITE": True}


class Trace(NamedTuple):
    """Requests in order: int64 addresses in blocks of the device, whether each writes, and int64 cycles at which they
    arrive (None: as soon as there is room, cycle 0 in a file)."""

    blocks: Array
    writes: Array
    arrivals: Array | None = None

    def served(self, dram: Device) -> Served:
        """What `dram` takes for them."""
        return serve(dram, self.blocks, self.writes, self.arrivals)


def write_trace(path: Path, dram: Device, trace: Trace) -> None:
    """Writes `trace` with addresses in bytes, hexadecimal."""
    cycles = np.zeros(len(trace.blocks), np.int64) if trace.arrivals is None else trace.arrivals
    rows = zip(trace.blocks.tolist(), trace.writes.tolist(), cycles.tolist(), strict=True)
    with path.open("w", encoding="ascii") as file:
        file.writelines(f"{block * dram.block:#x} {'WRITE' if write else 'READ'} {at}\n" for block, write, at in rows)


def read_trace(path: Path, dram: Device) -> Trace:
    """The requests of a file. Raises UserError with the line that is no request, or comes before the one above it."""
    blocks, writes, cycles = [], [], [0]
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            address, kind, at = line.split()
            blocks.append(int(address, 16) // dram.block)
            writes.append(KINDS[kind])
            cycles.append(int(at))
        except (ValueError, KeyError):
            raise _bad(path, number, line, "that is no request") from None
        if blocks[-1] < 0 or cycles[-1] < cycles[-2]:
            raise _bad(path, number, line, "addresses are positive, and cycles do not fall")
    arrivals = np.array(cycles[1:], np.int64)
    return Trace(np.array(blocks, np.int64), np.array(writes, bool), arrivals if arrivals.any() else None)


def _bad(path: Path, number: int, line: str, why: str) -> UserError:
    return UserError(f"{path}, line {number}: {line[:60]!r}.", why=why, do="lines such as 0x1f40 READ 120")
