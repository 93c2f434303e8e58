"""Row-wise top-k beside torch.topk and numpy.argpartition: CPU seconds and wall seconds, one thread and two.

    python bench/rtopk.py [--quick] [--pairs N] [--json FILE]

Large tensors of normal values first, then small ones (microseconds of a call, the better of torch's two forms), then a
sweep: widths from 16 to 65536 and k from 1 to width - 1, of each width the
k with the worst ratio, sorted or not, of CPU seconds for one thread and of wall seconds for two. "Never slower" means
that no case has its whole 95 % interval below 1; cases where torch's own form is chosen are compared too. Compiling is
not counted, allocating the results is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from espalier.kernels import rtopk
from table import Row, arguments, compare, publish, settle

LARGE = ((65536, 256, 32), (16384, 1024, 64), (4096, 8192, 128), (65536, 256, 128))
SMALL = ((1, 10, 3), (10, 16, 4), (100, 32, 4), (64, 64, 8), (20, 300, 8), (4, 1024, 8), (1000, 17, 4), (64, 256, 16))
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
LOOP = 2.0
"""Milliseconds."""
WIDTHS = (16, 32, 64, 100, 256, 1000, 4096, 16384, 65536)


class Taken(NamedTuple):
    """Milliseconds of one call."""

    cpu: float
    wall: float


def taken(run: Callable[[], Any], calls: int = 1) -> Taken:
    """Of `calls` one after the other; short ones have one before them that is not counted, as a core that slept has
    forgotten where everything is."""
    settle()
    if calls > 1:
        run()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    return Taken(1e3 * (time.process_time() - cpu) / calls, 1e3 * (time.perf_counter() - wall) / calls)


def turns(ours: Callable[[], Any], peer: Callable[[], Any], pairs: int) -> list[tuple[Taken, Taken]]:
    """Both in turn, in loops of about `LOOP` milliseconds, after one of each that is not counted."""
    ours(), peer()
    calls = max(1, int(LOOP / min(taken(run, 3).wall for run in (ours, peer))))
    return [(taken(ours, calls), taken(peer, calls)) for _ in range(pairs)]


def argpartition(x: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    array = x.numpy()
    columns = np.argpartition(array, array.shape[1] - k, axis=1)[:, -k:]
    return np.take_along_axis(array, columns, axis=1), columns


def gradients(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    run(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def large(shape: tuple[int, int, int], pairs: int) -> list[Row]:
    """Every peer on one large tensor."""
    rows, width, k = shape
    x = torch.randn(rows, width)
    half = x.bfloat16()
    threads = torch.get_num_threads()
    peers: list[tuple[str, str, Callable[[], Any], Callable[[], Any]]] = [
        ("torch.topk(sorted=False)", "", lambda: rtopk(x, k), lambda: torch.topk(x, k, sorted=False)),
        ("torch.topk(sorted=True)", " sorted", lambda: rtopk(x, k, sorted=True), lambda: torch.topk(x, k)),
        ("torch.topk(sorted=False)", " bf16", lambda: rtopk(half, k), lambda: torch.topk(half, k, sorted=False)),
        (
            "torch.topk(sorted=False)",
            " with gradient",
            lambda: gradients(lambda leaf: rtopk(leaf, k)[0], x),
            lambda: gradients(lambda leaf: torch.topk(leaf, k, sorted=False)[0], x),
        ),
    ]
    if threads == 1:  # NumPy has no more
        peers.insert(1, ("numpy.argpartition", "", lambda: rtopk(x, k), lambda: argpartition(x, k)))
    found = []
    for peer, what, ours, theirs in peers:
        measured = turns(ours, theirs, pairs)
        for unit in ("cpu", "wall"):
            case = f"{rows}×{width}, k = {k}{what}, {threads} threads"
            values = [(getattr(one, unit), getattr(other, unit)) for one, other in measured]
            found.append(compare(case, peer, f"ms {unit}", values, higher_is_better=False))
    return found


def small(shape: tuple[int, int, int], pairs: int) -> Row:
    """Wall microseconds of a call, in loops of a fifth of a millisecond or more."""
    rows, width, k = shape
    x = torch.randn(rows, width)

    def micros(run: Callable[[], Any], calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return 1e6 * (time.perf_counter() - began) / calls

    runs: list[Callable[[], Any]] = [
        lambda: rtopk(x, k),
        lambda: torch.topk(x, k, sorted=False),
        lambda: torch.topk(x, k),
    ]
    calls = max(5, int(200 / micros(runs[1], 20)))
    values = []
    for _ in range(pairs + 1):
        ours, *theirs = (micros(run, calls) for run in runs)
        values.append((ours, min(theirs)))
    case = f"{rows}×{width}, k = {k}, {torch.get_num_threads()} threads"
    return compare(case, "torch.topk, better of sorted or not", "µs", values[1:], higher_is_better=False)


def narrow(elements: int, width: int, pairs: int) -> list[Row]:
    """Every k of one width, sorted and not."""
    x = torch.randn(max(1, -(-elements // width)), width)
    threads = torch.get_num_threads()
    unit = "cpu" if threads == 1 else "wall"  # of one thread they are the same, but for what else the machine does
    rows = []
    for k in sorted({1, 2, width // 16, width // 8, width // 4, width // 2, width - 1} - {0}):
        for ranked in (False, True):
            measured = turns(
                lambda k=k, ranked=ranked: rtopk(x, k, sorted=ranked),
                lambda k=k, ranked=ranked: torch.topk(x, k, sorted=ranked),
                pairs,
            )
            values = [(getattr(one, unit), getattr(other, unit)) for one, other in measured]
            case = f"{x.shape[0]}×{width}, worst k = {k}{' sorted' if ranked else ''}, {threads} threads"
            rows.append(compare(case, f"torch.topk(sorted={ranked})", f"ms {unit}", values, higher_is_better=False))
    return rows


def sweep(sizes: Sequence[int], widths: Sequence[int], pairs: int) -> list[Row]:
    """Of each width the worst row; names those whose whole interval is below 1."""
    found, cases, slower = [], 0, []
    for elements in sizes:
        for width in widths:
            rows = narrow(elements, width, pairs)
            cases += len(rows)
            found.append(min(rows, key=lambda row: row.ratio))
            slower += [row for row in rows if float(row.spread.split("-")[1].split()[0]) < 1]
    print(f"sweep, {torch.get_num_threads()} threads: {len(slower)} of {cases} cases are slower beyond doubt")
    for row in slower:
        print(f"  {row.case.replace('worst ', '')}: {row.ratio:.2f}, {row.spread}")
    return found


def main() -> None:
    options = arguments(__doc__ or "")
    pairs = options.pairs or (7 if options.quick else 15)
    torch.manual_seed(0)
    rows: list[Row] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for shape in LARGE[:3] if options.quick else LARGE:
            rows += large(shape, pairs)
        rows += [small(shape, max(pairs, 15)) for shape in SMALL]
        sizes, widths = (
            ((100_000,), WIDTHS[::2]) if options.quick else ((10_000, 100_000, 1_000_000, 10_000_000), WIDTHS)
        )
        rows += sweep(sizes, widths, max(pairs, 15))
    publish(rows, options.json)


if __name__ == "__main__":
    main()
