"""DRAM: row hits, latencies, cycles and joules of a trace of reads and writes, by timings and currents of a device.

The controller is the one that DRAMsim3 models (Li et al., IEEE CAL 19(2), 2020): a channel takes one request in a cycle
into a window of reads or of writes and moves one a cycle to the queue of its bank; queues take turns, row hits go
first, up to four once another row is waited for; writes wait until their window is full, or until more than eight wait
and nothing else does; reads of what is still to be written are answered from that window. Rows stay open; a rank that
is due is refreshed. Energy is counted as DRAMsim3 does: activations, bursts, refreshes, and background with rows open
or not, each by its currents. Traces are read and written as DRAMsim3 has them: an address, READ or WRITE, and a cycle
on each line.
"""

from __future__ import annotations

import configparser
import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.recipe.errors import UserError, nearest

Array = NDArray[Any]
GRAPHICS = {"GDDR5": 4, "GDDR5X": 8, "GDDR6": 16}
"""Transfers in a cycle."""
STACKED = ("HBM", "HBM2")
PROTOCOLS = ("DDR3", "DDR4", "LPDDR", "LPDDR3", "LPDDR4", *GRAPHICS, *STACKED)


@dataclass(frozen=True)
class Device:
    """Timings in cycles of `tck` ns, currents in mA; see dram.csv for where they come from.

    Attributes:
        groups, banks, rows, columns: bank groups of a rank, banks of each, rows of a bank, columns of a row.
        device, bus: bits of a chip and of a channel; burst: transfers of a request, in `transfer` cycles of the bus;
            ranks: of a channel; mapping: fields of an address.
        cl, cwl, rcd, rcdwr, rtp: with the additive latency where there is one. *_long: within a bank group.
        aw32: cycles of 32 activations, 0: any number. queue, window: requests of a command queue, which belongs to a
            bank, or to a rank if `by_rank`; and of a channel that wait for one, reads and writes apart.
    """

    protocol: str
    groups: int
    banks: int
    rows: int
    columns: int
    device: int
    burst: int
    transfer: int
    channels: int
    ranks: int
    bus: int
    mapping: str
    queue: int
    window: int
    by_rank: int
    tck: float
    cl: int
    cwl: int
    rcd: int
    rcdwr: int
    rp: int
    ras: int
    rrd: int
    rrd_long: int
    ccd: int
    ccd_long: int
    faw: int
    aw32: int
    wr: int
    wtr: int
    wtr_long: int
    rtp: int
    rtrs: int
    ppd: int
    refi: int
    rfc: int
    vdd: float
    idd0: float
    idd2n: float
    idd3n: float
    idd4r: float
    idd4w: float
    idd5: float

    @property
    def block(self) -> int:
        """Bytes of a request."""
        return self.bus * self.burst // 8

    @property
    def peak(self) -> float:
        """Bytes in a cycle, all channels."""
        return self.block * self.channels / max(self.transfer, self.ccd, 1)

    @property
    def chips(self) -> int:
        """Of a rank."""
        return max(1, self.bus // self.device)

    @property
    def energies(self) -> tuple[float, float, float, float, float, float]:
        """Picojoules of an activation with its precharge, a read, a write, a refresh of a rank, and a cycle of a rank
        with a row open, and with none; not numbers where the currents make no sense (STT-MRAM's are not its own)."""
        scale = self.vdd * self.chips * self.tck
        act = self.idd0 * (self.ras + self.rp) - (self.idd3n * self.ras + self.idd2n * self.rp)
        bursts = ((self.idd4r - self.idd3n) * self.transfer, (self.idd4w - self.idd3n) * self.transfer)
        energies = (act, *bursts, (self.idd5 - self.idd3n) * self.rfc, self.idd3n, self.idd2n)
        scale = scale if min(energies) >= 0 else float("nan")
        activation, read, write, refresh, active, idle = (scale * each for each in energies)
        return activation, read, write, refresh, active, idle

    def parts(self, blocks: Array) -> tuple[Array, Array, Array]:
        """int64 (channel, bank with its rank and group, row) of each request, by the fields of `mapping`, highest
        first."""
        sizes = {"ro": self.rows, "ra": self.ranks, "bg": self.groups, "ba": self.banks, "ch": self.channels}
        sizes["co"] = max(1, self.columns // self.burst)
        rest, parts = blocks.astype(np.int64), {}
        for at in range(len(self.mapping) - 2, -1, -2):
            name = self.mapping[at : at + 2]
            bits = sizes[name].bit_length() - 1
            parts[name], rest = rest & ((1 << bits) - 1), rest >> bits
        return parts["ch"], (parts["ra"] * self.groups + parts["bg"]) * self.banks + parts["ba"], parts["ro"]


class Served(NamedTuple):
    """What a trace took.

    Attributes:
        cycles: until the last request is done; hits: reads and writes of a row that another one had opened; requests;
            activations; refreshes.
        latency: mean cycles of a read from when its channel takes it until its data are there; latency_99: of all but
            1 % of them at most.
        picojoules: of all, background included.
    """

    cycles: float
    hits: int
    requests: int
    activations: int
    refreshes: int
    latency: float
    latency_99: float
    picojoules: float


# --- devices -----------------------------------------------------------------------------------------------------


@cache
def devices() -> dict[str, Device]:
    """All devices of dram.csv, by name."""
    text = (Path(__file__).parent / "dram.csv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in text if not line.startswith("#"))
    return {row.pop("name"): _typed(row) for row in rows}


def _typed(row: Mapping[str, str]) -> Device:
    kinds = {"str": str, "int": int, "float": float}
    return Device(**{field.name: kinds[str(field.type)](row[field.name]) for field in fields(Device)})


def device(name: str) -> Device:
    """The device of that name, or of a parameter file of DRAMsim3 (`NAME.ini`). Raises UserError naming the nearest, or
    what of the file is not modelled."""
    if name.endswith(".ini"):
        return read_device(Path(name))
    if name not in devices():
        near = nearest(name, devices())
        raise UserError(f"No DRAM is called {name!r}.", do=near or next(iter(devices())))
    return devices()[name]


class _Parameters:
    """Of a file: the number at the beginning of each value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = configparser.ConfigParser(inline_comment_prefixes=(";", "#"), strict=False, interpolation=None)
        try:
            self.table.read_string(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from None
        except configparser.Error as error:
            raise self.bad(str(error).splitlines()[0]) from None

    def bad(self, why: str) -> UserError:
        return UserError(f"{self.path} is no DRAM that is modelled.", why=why, do=f"one of {', '.join(PROTOCOLS)}")

    def text(self, section: str, key: str, default: str) -> str:
        return self.table.get(section, key, fallback=default).strip()

    def number(self, section: str, key: str, default: float) -> float:
        given = self.text(section, key, str(default))
        match = re.match(r"-?\d+(\.\d*)?", given or str(default))
        if match is None:
            raise self.bad(f"{key} = {given} is no number")
        return float(match[0])


MODELLED = {
    ("system", "row_buf_policy"): "OPEN_PAGE",
    ("system", "refresh_policy"): "RANK_LEVEL_STAGGERED",
    ("system", "unified_queue"): "false",
    ("system", "enable_self_refresh"): "false",
    ("dram_structure", "hbm_dual_cmd"): "true",
}
"""What else a file may ask of the controller."""


def read_device(path: Path) -> Device:
    """The device of a parameter file of DRAMsim3. A key that is left out has the value that DRAMsim3 gives it.

    Raises UserError: a file that cannot be read, or asks for what is not modelled (HMC, pages that are closed after
    each request, one queue for reads and writes, refreshes by bank).
    """
    given = _Parameters(path)
    protocol = given.text("dram_structure", "protocol", "")
    if protocol not in PROTOCOLS:
        raise given.bad(f"its protocol is {protocol or 'not told'}")
    for (section, key), known in MODELLED.items():
        if given.text(section, key, known).lower() != known.lower():
            raise given.bad(f"{key} = {given.text(section, key, known)}")
    values = {**_structure(given, protocol), **_timings(given, protocol)}
    power = {"vdd": ("VDD", 1.2), "idd0": ("IDD0", 48), "idd2n": ("IDD2N", 34), "idd3n": ("IDD3N", 43)}
    power |= {"idd4r": ("IDD4R", 135), "idd4w": ("IDD4W", 123), "idd5": ("IDD5AB", 250)}
    values |= {name: given.number("power", key, default) for name, (key, default) in power.items()}
    made = Device(protocol=protocol, **values)
    for name in ("groups", "banks", "rows", "columns", "device", "burst", "channels", "bus", "queue", "window", "tck"):
        if getattr(made, name) <= 0:
            raise given.bad(f"{name} is {getattr(made, name)}")
    if sorted(re.findall("..", made.mapping)) != sorted(["ro", "ra", "bg", "ba", "ch", "co"]):
        raise given.bad(f"address_mapping = {made.mapping}")
    return made


def _structure(given: _Parameters, protocol: str) -> dict[str, Any]:
    def number(key: str, default: float, section: str = "dram_structure") -> int:
        return int(given.number(section, key, default))

    groups, banks = number("bankgroups", 2), number("banks_per_group", 2)
    if given.text("dram_structure", "bankgroup_enable", "true").lower() in ("false", "no", "off", "0"):
        groups, banks = 1, groups * banks
    rows, columns, width = number("rows", 1 << 16), number("columns", 1 << 10), number("device_width", 8)
    burst, bus = number("BL", 8), number("bus_width", 64, "system")
    columns *= burst if protocol in GRAPHICS else 2 if protocol in STACKED else 1
    megabytes = columns * width // 8 * (rows // 1024) // 1024 * groups * banks * (bus // max(1, width))
    return {
        "groups": groups,
        "banks": banks,
        "rows": rows,
        "columns": columns,
        "device": width,
        "burst": burst,
        "transfer": burst // GRAPHICS.get(protocol, 2),
        "channels": number("channels", 1, "system"),
        "ranks": max(1, number("channel_size", 1024, "system") // max(1, megabytes)),
        "bus": bus,
        "mapping": given.text("system", "address_mapping", "chrobabgraco"),
        "queue": number("cmd_queue_size", 16, "system"),
        "window": number("trans_queue_size", 32, "system"),
        "by_rank": int(given.text("system", "queue_structure", "PER_BANK") == "PER_RANK"),
    }


LEFT_OUT = {
    "CL": 12, "CWL": 12, "tRCD": 10, "tRCDRD": 24, "tRCDWR": 20, "tRP": 10, "tRAS": 24, "tRRD_S": 4, "tRRD_L": 4,
    "tCCD_S": 4, "tCCD_L": 6, "tFAW": 50, "t32AW": 330, "tWR": 10, "tWTR_S": 5, "tWTR_L": 5, "tRTP": 5, "tRTRS": 2,
    "tPPD": 0, "tREFI": 7800, "tRFC": 74, "AL": 0,
}  # fmt: skip
"""What DRAMsim3 takes for a timing that a file leaves out."""


def _timings(given: _Parameters, protocol: str) -> dict[str, Any]:
    of = {key: int(given.number("timing", key, default)) for key, default in LEFT_OUT.items()}
    alone = given.text("dram_structure", "bankgroup_enable", "true").lower() in ("false", "no", "off", "0")
    alone |= given.number("dram_structure", "bankgroups", 2) == 1
    close = "_S" if alone else "_L"
    apart = protocol in GRAPHICS or protocol in STACKED
    return {
        "tck": given.number("timing", "tCK", 1.0),
        "cl": of["AL"] + of["CL"],
        "cwl": of["AL"] + of["CWL"],
        "rcd": of["tRCDRD"] if apart else of["tRCD"] - of["AL"],
        "rcdwr": of["tRCDWR"] if apart else of["tRCD"] - of["AL"],
        "rp": of["tRP"],
        "ras": of["tRAS"],
        "rrd": of["tRRD_S"],
        "rrd_long": of["tRRD" + close],
        "ccd": of["tCCD_S"],
        "ccd_long": of["tCCD" + close],
        "faw": of["tFAW"],
        "aw32": of["t32AW"] if protocol in GRAPHICS else 0,
        "wr": of["tWR"],
        "wtr": of["tWTR_S"],
        "wtr_long": of["tWTR" + close],
        "rtp": of["AL"] + of["tRTP"],
        "rtrs": of["tRTRS"],
        "ppd": of["tPPD"] if protocol in GRAPHICS or protocol == "LPDDR4" else 0,
        "refi": of["tREFI"],
        "rfc": of["tRFC"],
    }


# --- a trace -----------------------------------------------------------------------------------------------------

TIMINGS = (
    "cl cwl rcd rcdwr rp ras rrd rrd_long ccd ccd_long faw aw32 wr wtr wtr_long rtp rtrs ppd "
    "refi rfc transfer ranks groups banks channels queue window by_rank"
)
"""As dram_cpu numbers them; after them whether a column command and another go out in one cycle, and whether requests
to a block that others wait for are answered with those."""


def serve(dram: Device, blocks: Array, writes: Array | bool = False, arrivals: Array | None = None) -> Served:
    """Requests to blocks of `dram.block` bytes.

    Args:
        blocks: int64, addresses in blocks. writes: bool of each, or of all.
        arrivals: int64 cycles, not falling: as in DRAMsim3, requests come from one place, one in a cycle, wait in
            order, and those to a block that others wait for are answered with those. None: each channel takes one of
            its own in a cycle, as soon as there is room, and moves each.
    """
    from espalier_accelerators import dram_cpu

    count = len(blocks)
    if not count:
        return Served(0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    channel, bank, row = dram.parts(np.asarray(blocks))
    known = np.broadcast_to(np.asarray(writes, np.int64), (count,))
    when = np.zeros(count, np.int64) if arrivals is None else np.asarray(arrivals, np.int64)
    bank = channel * (dram.ranks * dram.groups * dram.banks) + bank
    requests = np.stack([channel, bank, row, when, known, np.asarray(blocks, np.int64)], 1)
    starts = np.array([0, count], np.int64)
    if arrivals is None:
        order = np.argsort(channel.astype(np.uint16), kind="stable")  # sorted by radix, as 64 bits are not
        requests = np.ascontiguousarray(requests[order])
        starts = np.searchsorted(requests[:, 0], np.arange(dram.channels + 1)).astype(np.int64)
    flags = dram.protocol in STACKED, arrivals is not None
    timings = np.array([*(getattr(dram, name) for name in TIMINGS.split()), *flags], np.int64)
    ends = np.full((count, 3), -1, np.int64)
    totals = dram_cpu.serve(requests, starts, timings, ends)
    last, hits, acts, refreshes, reads, wrote, idle = (int(total) for total in totals)
    waited = (ends[:, 1] - ends[:, 0])[requests[:, 4] == 0]
    latency, late = (float(waited.mean()), float(np.percentile(waited, 99))) if len(waited) else (0.0, 0.0)
    act, read, write, refresh, active, rest = dram.energies
    energy = acts * act + reads * read + wrote * write + refreshes * refresh + idle * rest
    energy += (dram.channels * dram.ranks * last - idle) * active
    return Served(float(last), hits, count, acts, refreshes, latency, late, energy)


# --- traces as text ----------------------------------------------------------------------------------------------

KINDS = {"READ": False, "WRITE": True}


class Trace(NamedTuple):
    """Requests in order: int64 addresses in blocks of the device, whether each writes, and int64 cycles at which they
    arrive (None: see `serve`; cycle 0 in a file)."""

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
    """The requests of a file. Raises UserError: a file that cannot be read, or, with the line, what is no request or
    comes before the one above it."""
    blocks, writes, cycles = [], [], [0]
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", do="a file that write_trace made") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            address, kind, at = line.split()
            blocks.append(int(address, 16) // dram.block)
            writes.append(KINDS[kind])
            cycles.append(int(at))
        except (ValueError, KeyError):
            raise _bad(path, number, line, "that is no request") from None
        if blocks[-1] < 0 or cycles[-1] < cycles[-2]:
            raise _bad(path, number, line, "addresses are positive, and cycles do not fall")
    return Trace(np.array(blocks, np.int64), np.array(writes, bool), np.array(cycles[1:], np.int64))


def _bad(path: Path, number: int, line: str, why: str) -> UserError:
    return UserError(f"{path}, line {number}: {line[:60]!r}.", why=why, do="lines such as 0x1f40 READ 120")
