"""Codecs and encoded collectives: speeds beside zfpy, blosc2 and torch's int8; all-reduces and DDP over slow links.

    python bench/hybrid.py [--quick] [--pairs N] [--json FILE] [--only codecs,links,ddp]

Codecs: one thread, 4 MiB of normal float32 that lie in memory, encoded and decoded in turn; zfpy and blosc2 where they
are installed. Links: an all-reduce of 64 MiB (--quick: 16 MiB) over 4 hosts with an uplink each, beside Gloo in float32
and in half precision (what DDP's fp16 hook sends), in turn in the same processes; `auto` is what the break-even rule
chooses there. Bytes: the interface's payload and the ledger's. DDP: steps of a perceptron with 16 MiB of gradients.
All hosts share this machine's cores. Links need root (see bench/netlab.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch

from espalier.comm.codecs import codec
from netlab import Lab, Shape, first_said
from table import Row, compare, publish

RATES = (50e6, 100e6, 500e6, 1000e6)
HOSTS = 4
VALUES = 2**20
LINK = 125.0
"""MB/s of 1 Gbit/s: below this a codec can only lose there."""


def over_links(task: dict[str, Any], rate: float) -> dict[str, Any]:
    """`task` on every host of a lab, as rank 0 tells it."""
    command = [sys.executable, str(Path(__file__).parent / "hybrid_rank.py"), json.dumps(task)]
    with Lab(Shape(nodes=HOSTS, hosts=1, rate=rate)) as lab:
        found: dict[str, Any] = json.loads(first_said(lab.start(command)))
    return found


def links(turns: int, quick: bool) -> list[Row]:
    """All-reduces."""
    rows, size = [], 2**24 if quick else 2**26
    for rate in RATES:
        names = ["gloo", "fp16", "int8", "int4", "auto"]
        found = over_links({"what": "all_reduce", "contestants": names, "bytes": size, "turns": turns}, rate)
        case = f"all-reduce of {size >> 20} MiB, {HOSTS} hosts, {rate / 1e6:g} Mbit/s"
        for ours in ("int8", "int4", "auto"):
            for peer in ("gloo", "fp16"):
                seconds = found["seconds"]
                pairs = list(zip(seconds[ours], seconds[peer], strict=True))
                rows.append(compare(f"{case}, {ours}", peer, "s", pairs, higher_is_better=False))
        for ours in ("int8", "int4"):
            sent, booked = found["wire"][ours], found["ledger"][ours]
            rows.append(Row(f"{case}, {ours}: bytes", "interface", sent, booked, sent / booked, "bytes", "-"))
        print(f"{case}: auto: {found['auto']}", file=sys.stderr)
    return rows


def ddp(turns: int, quick: bool) -> list[Row]:
    """Training with DistributedDataParallel."""
    rows = []
    for rate in RATES[1:2] if quick else RATES:
        names = ["ddp", "fp16", "int8", "int4"]
        task = {"what": "ddp", "contestants": names, "turns": turns, "steps": 2, "width": 1024}
        found = over_links(task, rate)
        for ours in ("int8", "int4"):
            for peer in ("ddp", "fp16"):
                pairs = list(zip(found["seconds"][ours], found["seconds"][peer], strict=True))
                case = f"DDP step, 16 MiB of gradients, {HOSTS} hosts, {rate / 1e6:g} Mbit/s, {ours}"
                rows.append(compare(case, peer, "s", pairs, higher_is_better=False))
        print(f"losses at the end: {found['losses']}", file=sys.stderr)
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller tensors, fewer turns")
    parser.add_argument("--pairs", type=int, help="turns of each contestant")
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--only", default="codecs,links,ddp")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen, rows = asked.only.split(","), []
    if "codecs" in chosen:
        rows += codecs(asked.pairs or 7)
    if "links" in chosen:
        rows += links(asked.pairs or 5, asked.quick)
    if "ddp" in chosen:
        rows += ddp(asked.pairs or 5, asked.quick)
    publish(rows, asked.json)


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        raise SystemExit(str(error)) from None
