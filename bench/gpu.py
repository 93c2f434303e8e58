"""What runs on one GPU: every workload and mechanism against the processor, and kernels beside PyTorch's.

    python bench/gpu.py [--quick] [--pairs N] [--only steps,kernels] [--cases NAME;...] [--json FILE]

`steps`: each case of bench/gpu_case.py takes its first steps on the GPU, on the GPU once more but interrupted and
resumed, and on the processor, by the same plan. A row says by how much the losses differ at most, in parts of the loss,
and whether the resumed run had the same bits. Several run at once, so nothing is timed. `kernels`: milliseconds by
events on the device, ours and the peer in turn. Training is timed by bench/language.py, on the GPU where there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from espalier.kernels import accelerator, bits, mpc, rtopk, zfp
from gpu_case import CASES
from table import Row, arguments, compare, publish

STEPS = 6
LIMIT = 60
"""Seconds."""
LARGE = ((65536, 256, 32), (65536, 256, 128), (16384, 1024, 64), (4096, 8192, 128))
VALUES = 1 << 26


# --- steps -------------------------------------------------------------------------------------------------------


def taken(name: str, device: str, *stop: int) -> dict[str, Any]:
    """What one run of a case says; `error`: why it did not."""
    program = str(Path(__file__).parent / "gpu_case.py")
    command = [sys.executable, "-W", "ignore", program, name, device, *map(str, (STEPS, *stop))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {LIMIT} s"}
    if done.returncode:
        return {"error": done.stderr[-3000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def steps(names: list[str]) -> list[Row]:
    """A row for each case that ran; what did not is printed."""
    jobs = [(name, device) for name in names for device in (("cuda",), ("cuda", STEPS // 2), ("cpu",))]
    with ThreadPoolExecutor(max(1, 3 * len(os.sched_getaffinity(0)) // 4)) as pool:
        answers = list(pool.map(lambda job: taken(job[0], *job[1]), jobs))
    rows = []
    for name, one, other, plain in zip(names, answers[::3], answers[1::3], answers[2::3], strict=True):
        three = {"on the GPU": one, "resumed": other, "on the processor": plain}
        failed = [f"  {name}, {kind}: {it['error']}" for kind, it in three.items() if "error" in it]
        if failed:
            print("\n".join(failed))
            continue
        apart = max(abs(a - b) / abs(b) for a, b in zip(one["losses"], plain["losses"], strict=True))
        same = "the same bits" if one["losses"] == other["losses"] else "NOT the same bits"
        print(f"  {name}: {apart:.1e}, {same}, {one['memory'] / 2**20:.0f} MiB")
        case = f"{name}: losses of {STEPS} steps; resumed after {STEPS // 2}, {same}"
        rows.append(Row(case, "processor", plain["losses"][-1], one["losses"][-1], 1.0, "loss", f"{apart:.1e} at most"))
    return rows


# --- kernels -----------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], Any], calls: int) -> float:
    """Of one call, by events."""
    begin, end = accelerator.timer(), accelerator.timer()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    accelerator.synchronize()
    return float(begin.elapsed_time(end)) / calls


def beside(case: str, peer: str, ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int) -> Row:
    """Both in turn, in loops of about 5 ms, after one of each that is not counted."""
    ours(), theirs()
    accelerator.synchronize()
    calls = max(3, int(5 / min(milliseconds(run, 3) for run in (ours, theirs))))
    measured = [(milliseconds(ours, calls), milliseconds(theirs, calls)) for _ in range(pairs)]
    row = compare(case, peer, "ms", measured, higher_is_better=False)
    print(f"  {case}, {peer}: {row.ours:.4f} beside {row.peer_value:.4f}")
    return row


def largest(pairs: int) -> list[Row]:
    """Row-wise top-k beside torch.topk."""
    rows = []
    for count, width, k in LARGE:
        x = torch.randn(count, width, device="cuda")
        for kind, given, limit in (("fp32", x, None), ("bf16", x.bfloat16(), None), ("fp32, 6 bisections", x, 6)):
            ours = partial(rtopk, given, k, limit)
            theirs = partial(torch.topk, given, k, sorted=False)
            case = f"rtopk, {count} x {width}, k = {k}, {kind}"
            rows.append(beside(case, "torch.topk(sorted=False)", ours, theirs, pairs))
        values, columns = rtopk(x, k)
        assert torch.equal(values.sort().values, torch.topk(x, k).values.sort().values)
        assert torch.equal(x.gather(1, columns), values)
    return rows


def plain_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Absmax quantization by blocks in PyTorch's operations."""
    blocks = x.view(-1, bits.BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks / scales).round().to(torch.int8), scales


def codecs(pairs: int) -> list[Row]:
    """Codecs of gradients on 256 MiB of normal values: a call reads all, and says how fast it does."""
    x = torch.randn(VALUES, device="cuda")
    compiled = torch.compile(plain_int8)
    size, copy = f"{VALUES >> 20} Mi values", ("copy of the values", x.clone)
    rows = []

    def add(case: str, ours: Callable[[], Any], peer: tuple[str, Callable[[], Any]]) -> None:
        rows.append(beside(f"{case}, {size}", peer[0], ours, peer[1], pairs))

    for width in bits.BITS:
        pack = partial(bits.pack, x, width, bits.NEAREST)
        codes = pack()
        assert codes is not None
        if width == 8:
            add("int8 pack", pack, ("PyTorch's operations", lambda: plain_int8(x)))
            add("int8 pack", pack, ("torch.compile", lambda: compiled(x)))
        add(f"int{width} pack", pack, copy)
        add(f"int{width} unpack", partial(bits.unpack, *codes, width, VALUES), copy)
    stream = zfp.pack(x, 8)
    assert stream is not None
    add("zfp:8 pack", partial(zfp.pack, x, 8), copy)
    add("zfp:8 unpack", partial(zfp.unpack, stream, 8, VALUES), copy)
    words = x.view(mpc.WORDS[4])
    wire = mpc.pack(words, 1)
    assert torch.equal(mpc.unpack(wire, 4), words)
    add("MPC pack", partial(mpc.pack, words, 1), copy)
    add("MPC unpack", partial(mpc.unpack, wire, 4), copy)
    return rows


def main() -> None:
    asked = arguments(
        __doc__.splitlines()[0],
        only={"default": "steps,kernels", "help": "parts, separated by commas"},
        cases={"default": "", "help": "cases of steps, separated by semicolons"},
    )
    parts, pairs = asked.only.split(","), asked.pairs or (3 if asked.quick else 15)
    names = asked.cases.split(";") if asked.cases else list(CASES)
    rows = steps(names[::4] if asked.quick and not asked.cases else names) if "steps" in parts else []
    if "kernels" in parts:
        rows += largest(pairs) + codecs(pairs)
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
