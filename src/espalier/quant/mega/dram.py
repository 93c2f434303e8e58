"""DRAM: row hits, cycles and joules of a trace of reads and writes, by the timings and currents of a device.

Channels serve their requests in order, banks side by side, rows stay open. Timings kept: tRCD, tRP, tRAS, CL, CWL,
tRRD, tFAW, tCCD (short and long), tWR, tWTR, and refresh as a share of the cycles of a trace without arrivals. Energy
is counted as DRAMsim3 does (Li et al., IEEE CAL 19(2), 2020): an activation, a burst and background (rows open), each
by its currents; that of refresh is left out. Traces are read and written as DRAMsim3 has them: an address, READ or
WRITE, and a cycle on each line.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.errors import UserError, nearest

Array = NDArray[Any]
QUEUE = 32
"""Requests of a channel that are under way at once (DRAMsim3's trans_queue_size)."""


@dataclass(frozen=True)
class Device:
    """Timings in cycles of `tck` ns, currents in mA; see dram.toml for where they come from.

    Attributes:
        groups, banks, rows, columns: bank groups, banks of each, rows of a bank, columns of a row.
        device, bus: bits of a chip and of a channel; burst: transfers of a request; mapping: fields of an address.
    """

    protocol: str
    groups: int
    banks: int
    rows: int
    columns: int
    device: int
    burst: int
    channels: int
    bus: int
    mapping: str
    tck: float
    cl: int
    cwl: int
    rcd: int
    rp: int
    ras: int
    rrd: int
    ccd: int
    ccd_long: int
    faw: int
    wr: int
    wtr: int
    refi: int
    rfc: int
    vdd: float
    idd0: float
    idd2n: float
    idd3n: float
    idd4r: float
    idd4w: float

    @property
    def block(self) -> int:
        """Bytes of a request."""
        return self.bus * self.burst // 8

    @property
    def transfer(self) -> int:
        """Cycles in which the bus carries a request."""
        return max(1, self.burst // 2)

    @property
    def peak(self) -> float:
        """Bytes in a cycle, all channels."""
        return self.block * self.channels / max(self.transfer, self.ccd)

    @property
    def chips(self) -> int:
        """Of a rank."""
        return max(1, self.bus // self.device)

    @property
    def energies(self) -> tuple[float, float, float, float]:
        """Picojoules of an activation with its precharge, a read, a write, and a cycle of a channel's background."""
        scale = self.vdd * self.chips * self.tck
        act = self.idd0 * (self.ras + self.rp) - (self.idd3n * self.ras + self.idd2n * self.rp)
        bursts = ((self.idd4r - self.idd3n) * self.transfer, (self.idd4w - self.idd3n) * self.transfer)
        return act * scale, bursts[0] * scale, bursts[1] * scale, self.idd3n * scale

    def parts(self, blocks: Array) -> tuple[Array, Array, Array]:
        """int64 (channel, bank with its group, row) of each request, by the fields of `mapping`, highest first."""
        sizes = {"ro": self.rows, "ra": 1, "bg": self.groups, "ba": self.banks, "ch": self.channels}
        sizes["co"] = max(1, self.columns // self.burst)
        rest, found = blocks.astype(np.int64), {}
        for at in range(len(self.mapping) - 2, -1, -2):
            name = self.mapping[at : at + 2]
            rest, found[name] = np.divmod(rest, sizes[name])
        return found["ch"], found["bg"] * self.banks + found["ba"], found["ro"]


class Served(NamedTuple):
    """What a trace took.

    Attributes:
        cycles: until the last request is done; hits: requests to a row that was open; requests; activations.
        latency: mean cycles from arrival to data; picojoules: of all, background included.
    """

    cycles: float
    hits: int
    requests: int
    activations: int
    latency: float
    picojoules: float


@cache
def devices() -> dict[str, Device]:
    """All devices of dram.toml, by name."""
    table = tomllib.loads((Path(__file__).parent / "dram.toml").read_text(encoding="utf-8"))
    return {name: Device(**entry) for name, entry in table.items()}


def device(name: str) -> Device:
    """The device of that name. Raises UserError naming the nearest."""
    if name not in devices():
        near = nearest(name, devices())
        raise UserError(f"No DRAM is called {name!r}.", do=near or next(iter(devices())))
    return devices()[name]


def serve(dram: Device, blocks: Array, writes: Array | bool = False, arrivals: Array | None = None) -> Served:
    """Requests to blocks of `dram.block` bytes, in order.

    Args:
        blocks: int64, addresses in blocks. writes: bool of each, or of all.
        arrivals: int64 cycles, not falling; None: each as soon as its channel's queue has room.
    """
    from espalier.quant.mega import dram_cpu

    count = len(blocks)
    if not count:
        return Served(0.0, 0, 0, 0, 0.0, 0.0)
    channel, bank, row = dram.parts(np.asarray(blocks))
    known = np.broadcast_to(np.asarray(writes, np.uint8), (count,))
    when = np.zeros(count, np.int64) if arrivals is None else np.asarray(arrivals, np.int64)
    names = "cl cwl rcd rp ras rrd ccd ccd_long faw wr wtr transfer groups banks channels"
    timings = np.array([int(getattr(dram, name)) for name in names.split()], np.int64)
    found = dram_cpu.serve(
        np.stack([channel, bank, row, when, known.astype(np.int64)], 1), timings, int(arrivals is not None)
    )
    last, hits, acts, waited, wrote = (int(one) for one in found)
    cycles = last * (1 + (dram.rfc / dram.refi if arrivals is None else 0.0))
    act, read, write, idle = dram.energies
    energy = acts * act + (count - wrote) * read + wrote * write + idle * dram.channels * cycles
    return Served(cycles, hits, count, acts, waited / count, energy)


# --- traces as text ----------------------------------------------------------------------------------------------

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
