"""Codecs and encoded collectives: speeds beside zfpy, blosc2 and torch's int8; all-reduces and DDP over slow links.

    python bench/hybrid.py [--quick] [--pairs N] [--json FILE] [--only codecs,links,mpi,fast,sites,ddp,cuts]

Codecs: one thread, 4 MiB of normal float32 that lie in memory, encoded and decoded in turn; zfpy and blosc2 where they
are installed. Links: an all-reduce of 64 MiB (--quick: 16 MiB) over 4 hosts with an uplink each, beside Gloo in float32
and in half precision (what DDP's fp16 hook sends), in turn in the same processes; `auto` is what the break-even rule
chooses there. Bytes: the interface's payload and the ledger's. MPI: int8 beside MPI_Allreduce of the mpich wheel,
under its mpiexec. Fast: the same hosts with no limit. Sites: a ring of 4 machines at two sites, ranks numbered by the
measured links beside ranks numbered in turn. DDP: steps of a perceptron with 16 MiB of gradients. Cuts: steps of a
decoder of 4 M parameters that stages, tensor ranks or replicas share over two machines, by each scheme of codecs. All
hosts share this machine's cores. All but codecs need root (see bench/netlab.py), MPI also `espalier-train[mpi]`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch

from espalier.comm.codecs import codec
from netlab import Lab, Shape, first_said
from table import Row, arguments, compare, publish

RATES = (50e6, 100e6, 500e6, 1000e6)
CUT_RATES = (50e6, 200e6)
CUTS = {
    "2 stages": (1, {"pp": 2, "micro_batch": 2}),
    "matrices over 2": (1, {"tp": 2, "micro_batch": 8}),
    "samples over 2": (1, {"dp": 2, "micro_batch": 4}),
    "2 stages x 2 replicas": (2, {"pp": 2, "dp": 2, "micro_batch": 2}),
}
"""Hosts of a machine, and what the plan is held to."""
HOSTS = 4
VALUES = 2**20
LINK = 125.0
"""MB/s of 1 Gbit/s: below this a codec can only lose there."""
MPI = "MPI_Allreduce (mpich)"


def over_links(task: dict[str, Any], shape: Shape, mpiexec: str = "") -> dict[str, Any]:
    """`task` on every host of a lab, as rank 0 tells it."""
    command = [sys.executable, str(Path(__file__).parent / "hybrid_rank.py"), json.dumps(task)]
    with Lab(shape) as lab:
        ranks = [lab.start_mpi(mpiexec, command)] if mpiexec else lab.start(command)
        found: dict[str, Any] = json.loads(first_said(ranks))
    return found


def shaped(rate: float) -> Shape:
    """Hosts with an uplink each."""
    return Shape(nodes=HOSTS, hosts=1, rate=rate)


def case_of(size: int, rate: float) -> str:
    """What is done, in words."""
    return f"all-reduce of {size >> 20} MiB, {HOSTS} hosts, {f'{rate / 1e6:g} Mbit/s' if rate else 'no limit'}"


def beside(case: str, found: dict[str, list[float]], ours: str, peer: str, named: str = "") -> Row:
    """A row from the seconds of two contestants."""
    pairs = list(zip(found[ours], found[peer], strict=True))
    return compare(f"{case}, {ours}", named or peer, "s", pairs, higher_is_better=False)


def links(turns: int, quick: bool) -> list[Row]:
    """All-reduces."""
    rows, size = [], 2**24 if quick else 2**26
    for rate in RATES:
        names = ["gloo", "fp16", "int8", "int4", "auto"]
        task = {"what": "all_reduce", "contestants": names, "bytes": size, "turns": turns}
        found = over_links(task, shaped(rate))
        case = case_of(size, rate)
        rows += [beside(case, found["seconds"], ours, peer) for ours in names[2:] for peer in names[:2]]
        for ours in ("int8", "int4"):
            sent, booked = found["wire"][ours], found["ledger"][ours]
            rows.append(Row(f"{case}, {ours}: bytes", "interface", sent, booked, sent / booked, "bytes", "-"))
        print(f"{case}: auto: {found['auto']}", file=sys.stderr)
    return rows


def mpi(turns: int, quick: bool) -> list[Row]:
    """Beside MPI's own, under mpiexec."""
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if mpiexec is None or not importlib.util.find_spec("mpi4py"):
        print("mpi: left out, as mpi4py and mpich are not installed", file=sys.stderr)
        return []
    rows, size = [], 2**24 if quick else 2**26
    for rate in RATES:
        task = {"what": "all_reduce", "contestants": ["mpi", "int8"], "bytes": size, "turns": turns}
        found = over_links(task, shaped(rate), mpiexec)
        rows.append(beside(case_of(size, rate), found["seconds"], "int8", "mpi", MPI))
    return rows


def fast(turns: int, quick: bool) -> list[Row]:
    """Where links are as fast as this machine's memory lets them be."""
    size = 2**24 if quick else 2**26
    names = ["gloo", "auto", "int8", "gloo again"]
    task = {"what": "all_reduce", "contestants": names, "bytes": size, "turns": 3 * turns}
    found = over_links(task, shaped(0.0))
    print(f"{case_of(size, 0.0)}: auto: {found['auto']}", file=sys.stderr)
    chosen = f"{case_of(size, 0.0)}; auto takes {found['chosen']}"
    return [beside(chosen, found["seconds"], ours, "gloo") for ours in names[1:]]


def sites(turns: int, quick: bool) -> list[Row]:
    """Rank order."""
    size = 2**22 if quick else 2**24
    task = {"what": "sites", "bytes": size, "turns": turns}
    found = over_links(task, Shape(nodes=2, hosts=2, rate=100e6))
    case = f"ring of {size >> 20} MiB through 4 machines, 2 at each of 2 sites, 100 Mbit/s between, ranks in the order"
    pairs = list(zip(found["seconds"]["ring"], found["seconds"]["turn"], strict=True))
    order = ", ".join(map(str, found["order"]))
    return [compare(f"{case} {order} that the measured links give", "ranks in turn", "s", pairs, False)]


def ddp(turns: int, quick: bool) -> list[Row]:
    """Training with DistributedDataParallel."""
    rows = []
    for rate in RATES[1:2] if quick else RATES:
        names = ["ddp", "fp16", "int8", "int4", "auto"]
        task = {"what": "ddp", "contestants": names, "turns": turns, "steps": 2, "width": 1024}
        found = over_links(task, shaped(rate))
        case = f"DDP step, 16 MiB of gradients, {HOSTS} hosts, {rate / 1e6:g} Mbit/s"
        rows += [beside(case, found["seconds"], ours, peer) for ours in names[2:] for peer in names[:2]]
        print(f"losses at the end: {found['losses']}; auto takes {found['chosen']}", file=sys.stderr)
    return rows


def cuts(turns: int, quick: bool) -> list[Row]:
    """A decoder cut over two machines, each scheme beside the exact run."""
    rows = []
    schemes = ["exact", "naive", "mzhybrid", "zhybrid"]
    for rate in CUT_RATES[:1] if quick else CUT_RATES:
        for name, (hosts, pin) in CUTS.items():
            machines = (
                f'[[nodes]]\ndevice = "cpu"\ncores = {hosts}\nmemory = "8GiB"\ncount = 2\n'
                '[links]\nbetween = "1Gbit/s"'  # of slower ones a plan leaves one machine idle
            )
            task = {"what": "cut", "contestants": schemes, "machines": machines, "pin": pin}
            found = over_links(task | {"turns": turns, "steps": 1}, Shape(nodes=2, hosts=hosts, rate=rate))
            case = f"decoder of 4 M, {name} over 2 machines, {rate / 1e6:g} Mbit/s"
            rows += [beside(case, found["seconds"], scheme, "exact") for scheme in schemes[1:]]
            for scheme in schemes[1:]:
                exact, coded = (sum(found["sent"][label].values()) for label in ("exact", scheme))
                rows.append(
                    Row(f"{case}, {scheme}: bytes of a step", "exact", exact, coded, exact / coded, "bytes", "-")
                )
            print(f"{case}: losses {found['losses']}; sent {found['sent']}; {found['why']}", file=sys.stderr)
    return rows


# --- codecs --------------------------------------------------------------------------------------------------------


def _seconds(run: Callable[[], Any], times: int = 3) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return min(found)


def ours(name: str, x: torch.Tensor) -> tuple[float, float]:
    """MB/s of encoding and decoding."""
    one = codec(name)
    wire = one.encode(x)
    assert wire is not None
    encode, decode = _seconds(lambda: one.encode(x)), _seconds(lambda: one.decode(wire, x))
    return x.nbytes / encode / 1e6, x.nbytes / decode / 1e6


def zfpy_at(rate: float, x: torch.Tensor) -> tuple[float, float]:
    """The reference."""
    import zfpy

    array = x.numpy()
    wire = zfpy.compress_numpy(array, rate=rate)
    encode = _seconds(lambda: zfpy.compress_numpy(array, rate=rate), 1)
    return x.nbytes / encode / 1e6, x.nbytes / _seconds(lambda: zfpy.decompress_numpy(wire), 1) / 1e6


def blosc2_zstd(x: torch.Tensor) -> tuple[float, float]:
    """Bit shuffle and zstd at level 1, one thread."""
    import blosc2

    blosc2.set_nthreads(1)
    raw = x.numpy().tobytes()

    def pack() -> bytes:
        return blosc2.compress2(raw, typesize=4, codec=blosc2.Codec.ZSTD, clevel=1, filters=[blosc2.Filter.BITSHUFFLE])

    wire = pack()
    return x.nbytes / _seconds(pack) / 1e6, x.nbytes / _seconds(lambda: blosc2.decompress2(wire)) / 1e6


def torch_int8(x: torch.Tensor) -> tuple[float, float]:
    """torch's own quantized tensors: one scale for each row of 256."""
    rows = x.view(-1, 256)
    zeros = torch.zeros(len(rows), dtype=torch.int64)

    def pack() -> torch.Tensor:
        return torch.quantize_per_channel(rows, rows.abs().amax(1) / 127, zeros, 0, torch.qint8)

    wire = pack()
    return x.nbytes / _seconds(pack) / 1e6, x.nbytes / _seconds(wire.dequantize) / 1e6


def codecs(turns: int) -> list[Row]:
    """Speeds."""
    x = torch.randn(VALUES, generator=torch.Generator().manual_seed(1)) * 1e-3
    pairs: list[tuple[str, str, Callable[[torch.Tensor], tuple[float, float]]]] = [
        ("int8", "torch quantize_per_channel", torch_int8),
        ("int4", "torch quantize_per_channel (8 bits)", torch_int8),
    ]
    if importlib.util.find_spec("zfpy"):
        pairs += [(f"zfp:{rate}", "zfpy", lambda x, rate=rate: zfpy_at(rate, x)) for rate in (4, 8, 16)]
    if importlib.util.find_spec("blosc2"):
        pairs += [("split", "blosc2 bitshuffle+zstd", blosc2_zstd), ("mpc", "blosc2 bitshuffle+zstd", blosc2_zstd)]
    rows = []
    for name, peer, run in pairs:
        found = [(ours(name, x), run(x)) for _ in range(turns)]
        for index, what in enumerate(("encode", "decode")):
            column = [(mine[index], theirs[index]) for mine, theirs in found]
            rows.append(compare(f"{name}, {what}, 4 MiB float32", peer, "MB/s", column))
    for name in ("bf16", "int1", "int8:stochastic", "split", "mpc", "zfp:8", "topk:0.01"):
        slower = [(min(ours(name, x)), LINK) for _ in range(turns)]
        rows.append(compare(f"{name}, slower of both ways, 4 MiB float32", "1 Gbit/s", "MB/s", slower))
    low = x.bfloat16().repeat(2)
    for name in ("int8", "split", "mpc"):
        slower = [(min(ours(name, low)), LINK) for _ in range(turns)]
        rows.append(compare(f"{name}, slower of both ways, 4 MiB bfloat16", "1 Gbit/s", "MB/s", slower))
    return rows


def main() -> None:
    asked = arguments((__doc__ or "").splitlines()[0], only={"default": "codecs,links,mpi,fast,sites,ddp,cuts"})
    torch.set_num_threads(1)
    turns = asked.pairs or (3 if asked.quick else 5)
    rows: list[Row] = []
    for name in asked.only.split(","):
        rows += codecs(turns) if name == "codecs" else PARTS[name](turns, asked.quick)
    publish(rows, asked.json)


PARTS = {"links": links, "mpi": mpi, "fast": fast, "sites": sites, "ddp": ddp, "cuts": cuts}

if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        raise SystemExit(str(error)) from None
