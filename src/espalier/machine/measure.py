"""Measures this machine's processor, devices and loopback; run as a program of its own by `machine.probe`.

A program, so that the caller's threads and its CUDA stay untouched. It forks one set of processes per setting
(processes x threads) before it ever used a second thread, which is the only time at which forking PyTorch is safe, and
each of them touches CUDA only after the fork. Prints one JSON object per line: `say` at work, `result` at the end.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from espalier.kernels import accelerator
from espalier.machine.cluster import Link
from espalier.machine.peak_memory import bytes_held
from espalier.recipe import serialization
from espalier.recipe.data_table import data_table

SIZES = data_table(__file__)
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "fp16": torch.float16,
}
WAIT = 100.0
"""Seconds after which a measuring process that does not answer is given up: beside busy programs each takes long."""
ROUNDS, BUSY_ROUNDS = 2, 4
"""How often everything is measured, on a machine that is idle when the program begins and on one that is not. Several
rounds see more of a machine than the same time spent at once."""
LINK_ROUNDS, LINK_REPEATS = 4, 4
"""The same of messages, and how often a round sends each."""

Table = dict[str, Any]
Gate = Callable[[], None]
Asked = tuple[str, str, tuple[int, int, int]]
"""What to measure (`product`, `attention`), the precision, and the sizes as `Rate` has them."""


def settings(cores: int) -> list[tuple[int, int]]:
    """(processes, threads) to measure: one of one, one per core, all cores in one; a middle where cores are many."""
    pairs = [(1, 1)]
    if cores > 1:
        pairs += [(cores, 1), (1, cores)]
    middle = [d for d in range(2, cores) if cores % d == 0 and d * d >= cores]
    if cores >= 8 and middle:
        pairs.append((middle[0], cores // middle[0]))
    return pairs


def main(cores: int, seconds: float) -> Table:
    """Everything measured, as a table that `machine.probe` makes a cluster of. `seconds`: time for each product."""
    torch.set_num_threads(1)
    result: Table = {"rates": [], "copies": [], "notes": [], "torch": torch.__version__}
    busy = os.getloadavg()[0] > cores + 0.5  # more was runnable than there are cores
    if torch.version.cuda is not None:
        _say("measuring CUDA devices")
        result |= together(1, lambda _gate, _index: _cuda(seconds))[0]
    if not result.get("cuda"):
        low = together(1, lambda _gate, _index: _low(seconds))[0]["fast"]
        for processes, threads in settings(cores):
            _say(f"multiplying matrices in {processes} process(es) of {threads} thread(s)")
            _add(result, (processes, threads), asked(processes * threads == 1, low), seconds, busy)
    _say("timing messages between two processes on this machine")
    result["link"], notes = _loopback()
    result["notes"] += notes
    return result


def asked(alone: bool, low: bool) -> list[Asked]:
    """What one setting measures. `alone`: one process of one thread; `low`: bf16 is no slower than fp32."""
    other = SIZES["other_products"][: None if alone else 1]
    products = [("fp32", shape) for shape in SIZES["products"]] + [
        (kind, shape) for kind in ("bf16", "fp64") for shape in other
    ]
    attention = [("fp32", size) for size in SIZES["attention"]]
    if low:
        products += [("bf16", shape) for shape in SIZES["low_products"]]
        attention += [("bf16", size) for size in SIZES["low_attention"]]
    return [
        *(("product", precision, shape) for precision, shape in products),
        *(("attention", precision, (length, head, length)) for precision, (length, head) in attention),
    ]


def _low(seconds: float) -> Table:
    """Whether a product in bf16 is no slower than in fp32."""
    torch.set_num_threads(1)
    bf16, fp32 = (_product(SIZES["other_products"][-1], DTYPES[kind], seconds / 2) for kind in ("bf16", "fp32"))
    return {"fast": bf16 >= fp32}


def _add(result: Table, setting: tuple[int, int], asked: Sequence[Asked], seconds: float, busy: bool) -> None:
    """Runs one setting and puts the mean of its processes into `result`.

    On a `busy` machine several threads are seldom all running, and wait for each other: there they count as fast as one
    thread at least, which is measured first.
    """
    processes, threads = setting
    rounds = BUSY_ROUNDS if busy else ROUNDS
    parts = together(processes, lambda gate, _index: _processor(gate, setting, asked, (seconds, rounds)))
    alone = {tuple(row[:5]): row[-1] for row in result["rates"] if row[5:7] == [1, 1]} if busy else {}
    for rows in zip(*(part["rates"] for part in parts), strict=True):
        mean = sum(row[-1] for row in rows) / len(rows)
        result["rates"].append([*rows[0][:5], threads, processes, max(mean, alone.get(tuple(rows[0][:5]), 0.0))])
    mean = sum(part["copy"] for part in parts) / processes
    least = next((row[-1] for row in result["copies"] if row[:2] == [1, 1]), 0.0) / processes if busy else 0.0
    result["copies"].append([threads, processes, max(mean, least)])
    if processes == threads == 1:
        result |= {"dispatch": parts[0]["dispatch"], "runtime": parts[0]["runtime"]}


# --- one process -------------------------------------------------------------------------------------------------


def _processor(gate: Gate, setting: tuple[int, int], asked: Sequence[Asked], often: tuple[float, int]) -> Table:
    (processes, threads), (seconds, rounds) = setting, often
    torch.set_num_threads(threads)
    runtime = bytes_held()
    warm = torch.ones(256, 256)
    _best(lambda: torch.mm(warm, warm), 0.05)  # threads start, clocks rise
    rounds_of_rates = [_round(gate, asked, seconds / 2) for _ in range(rounds)]
    rates = [max(rows) for rows in zip(*rounds_of_rates, strict=True)]
    copies, dispatches = [], []
    for _ in range(rounds):
        gate()
        copies.append(_copy(max(2**22, 2**24 // processes), seconds / 2))
        dispatches.append(_dispatch())
    return {"rates": rates, "copy": max(copies), "dispatch": min(dispatches), "runtime": runtime}


def _round(gate: Gate, asked: Sequence[Asked], seconds: float) -> list[list[Any]]:
    """Every product and attention once."""
    rates: list[list[Any]] = []
    for what, precision, shape in asked:
        gate()
        run = _product if what == "product" else _attention
        rates.append([what, precision, *shape, run(shape, DTYPES[precision], seconds)])
    return rates


def _product(shape: Sequence[int], dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of a product whose right side lies transposed, as weights do."""
    rows, inner, columns = shape
    left, right = torch.full((rows, inner), 0.5, dtype=dtype), torch.full((columns, inner), 0.5, dtype=dtype)
    return 2.0 * rows * inner * columns / _best(lambda: torch.mm(left, right.t()), seconds)


def _attention(shape: Sequence[int], dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of causal attention of as many heads as have 2,048 positions together, counting half of the square."""
    length, head, _ = shape
    heads = max(1, 2048 // length)
    query = torch.full((1, heads, length, head), 0.5, dtype=dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    flops = 4.0 * length * length * head * heads / 2
    return flops / _best(lambda: attend(query, query, query, is_causal=True), seconds)


def _copy(elements: int, seconds: float) -> float:
    """Bytes/s read plus written while copying float32; far larger than a cache."""
    source, target = torch.ones(elements), torch.ones(elements)
    return 8.0 * elements / _best(lambda: target.copy_(source), 2 * seconds)


def _dispatch(device: str = "cpu") -> float:
    """Seconds of one operation on next to no data: five kinds as decoders use them, forward and backward (twice)."""
    functional = torch.nn.functional
    weight = torch.full((16, 16), 0.1, device=device, requires_grad=True)
    scale = torch.ones(16, device=device, requires_grad=True)
    start, blocks = torch.ones(4, 16, device=device, requires_grad=True), 8

    def chain() -> None:
        x = start
        for _ in range(blocks):
            hidden = functional.linear(functional.rms_norm(x, (16,), scale), weight)
            x = x + functional.silu(hidden) * hidden
        x.sum().backward()

    return _best(chain, 0.03, one_thread=device == "cpu") / (blocks * 5 * 3)


def _best(run: Callable[[], Any], seconds: float, one_thread: bool = True) -> float:
    """Seconds of the fastest `run` of at least two and of about `seconds`.

    The fastest, because what else the machine does while it is measured is not the machine; what the processes of one
    setting take from each other is in every run. For the same reason only processor time counts where torch uses one
    thread and `run` is done by the calling one (`one_thread`).
    """
    clock = time.thread_time if one_thread and torch.get_num_threads() == 1 else time.perf_counter
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        begin = clock()
        run()
        times.append(clock() - begin)
    return min(times)


# --- CUDA --------------------------------------------------------------------------------------------------------


def _cuda(seconds: float) -> Table:
    """Measured tables of the CUDA devices, one for each, in their order; empty when none can be used."""
    count = accelerator.count()
    if not count:
        return {}
    return {"cuda": [_cuda_device(index, seconds) for index in range(count)], "peer": _peer() if count > 1 else None}


def _cuda_device(index: int, seconds: float) -> Table:
    properties = accelerator.properties(index)
    accelerator.select(torch.device(accelerator.KIND, index))
    rates = []
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        if precision in ("tf32", "bf16") and properties.major < 8:
            continue  # not there, or emulated, before Ampere
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        for shape in SIZES["cuda_products"]:
            rates.append(["product", precision, *shape, 1, 1, _cuda_product(shape, DTYPES[precision], seconds)])
    source = torch.ones(2**26, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 8.0 * source.numel() / _cuda_seconds(lambda: target.copy_(source), 10)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "memory_bandwidth": bandwidth,
        "rates": rates,
        "dispatch": _dispatch("cuda"),
    }


def _cuda_product(shape: Sequence[int], dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s; random values, because a GPU multiplies constants faster (they cost less power)."""
    rows, inner, columns = shape
    left = torch.randn(rows, inner, device="cuda", dtype=dtype)
    right = torch.randn(columns, inner, device="cuda", dtype=dtype)

    def run() -> None:
        torch.mm(left, right.t())

    once = _cuda_seconds(run, 3)
    return 2.0 * rows * inner * columns / _cuda_seconds(run, max(3, min(200, int(seconds / once))))


def _cuda_seconds(run: Callable[[], Any], repeats: int) -> float:
    run()
    begin, end = accelerator.timer(), accelerator.timer()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    accelerator.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def _peer() -> float:
    """Bytes/s of a copy from device 0 to device 1."""
    source = torch.ones(2**26, device="cuda:0")
    target = torch.empty(2**26, device="cuda:1")
    accelerator.select(source.device)
    return 4.0 * source.numel() / _cuda_seconds(lambda: target.copy_(source), 10)


# --- many processes ----------------------------------------------------------------------------------------------


def together(processes: int, job: Callable[[Gate, int], Table]) -> list[Table]:
    """What `job(gate, index)` returns in each of `processes` forked processes; `gate()` waits for all of them."""
    context = mp.get_context("fork")
    barrier = context.Barrier(processes)
    ends = [context.Pipe(duplex=False) for _ in range(processes)]

    def gate() -> None:
        barrier.wait(WAIT)

    def run(index: int, answer: Connection) -> None:
        answer.send_bytes(serialization.dumps(job(gate, index)))

    workers = [context.Process(target=run, args=(i, ends[i][1]), daemon=True) for i in range(processes)]
    for worker in workers:
        worker.start()
    for _, writing in ends:
        writing.close()
    try:
        return [_receive(reading, index) for index, (reading, _) in enumerate(ends)]
    finally:
        for worker in workers:
            worker.join(1.0)
            if worker.is_alive():
                worker.kill()


def _receive(reading: Connection, index: int) -> Table:
    if not reading.poll(WAIT):
        raise TimeoutError(f"measuring process {index} gave no answer within {WAIT:.0f} s")
    return serialization.loads(reading.recv_bytes(), "what a measuring process found")


def _loopback() -> tuple[Table | None, list[str]]:
    """The link between two gloo ranks on this machine; None with a note when gloo cannot start here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return together(2, lambda _gate, index: _gloo(folder, index))[0], []
        except (EOFError, OSError) as error:  # a rank that died closes its pipe
            return None, [f"link: gloo over loopback could not be measured ({error or 'its process ended'})"]


def _gloo(folder: str, rank: int) -> Table:
    import torch.distributed as dist

    from espalier.machine import link

    loopback = [name for name in os.listdir("/sys/class/net") if name.startswith("lo")]
    os.environ["GLOO_SOCKET_IFNAME"] = loopback[0] if loopback else "lo"
    address = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=10))
    rounds = [link.measure(repeats=LINK_REPEATS) for _ in range(LINK_ROUNDS)]
    dist.destroy_process_group()
    return fastest([matrix.link(0, 1) for matrix in rounds])


def fastest(links: Sequence[Link]) -> Table:
    """The link between two ranks without other programs' share of the processors.

    Of several rounds the least seconds count of a small message, of one of 4 MiB, and of a small all-reduce (two hops
    and the launch); what a link is made of follows from these three.
    """
    size = 4 * 2**20
    latency = min(link.latency for link in links)
    whole = min(link.latency + size / link.bandwidth for link in links)
    together = min(2 * link.latency + link.launch for link in links)
    return {
        "bandwidth": size / max(whole - latency, 1e-9),
        "latency": latency,
        "launch": max(0.0, together - 2 * latency),
    }


def _say(text: str) -> None:
    _print({"say": text})


def _print(table: Table) -> None:
    sys.stdout.write(json.dumps(table) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _print({"result": main(int(sys.argv[1]), float(sys.argv[2]))})
