"""The store beside dd, plain direct reads by threads, and a memory map: bytes per second, rows per second, latency.

    python bench/store.py [--quick] [--pairs N] [--folder FOLDER] [--json FILE]

Sequential transfers are of 8 MiB past the page cache, a final flush counted. Random rows have 512 bytes (128 float32),
in batches of 32768; the page cache of the map is dropped before each turn, as features larger than memory find it.
Latency is of one 4 KiB read every millisecond while 8 MiB writes wait in the same queue.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from espalier.store import (
    DirectFile,
    ExtentFile,
    ExtentWriter,
    File,
    IoQueue,
    RowFile,
    RowLayout,
    RowWriter,
    aligned,
)
from table import Row, arguments, compare, publish, settle

BLOCK = 8 << 20
BATCH = 32_768
THREADS = 32


def seconds(run: Callable[[], object]) -> float:
    settle()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def pairs_of(
    ours: Callable[[], object], peer: Callable[[], object], pairs: int, amount: float
) -> list[tuple[float, float]]:
    """Amount per second of both, in turn, after one of each that is not counted."""
    ours(), peer()
    return [(amount / seconds(ours), amount / seconds(peer)) for _ in range(pairs)]


def dd(*words: str) -> None:
    subprocess.run(["dd", *words, "bs=8M", "status=none"], check=True)


def sequential(folder: Path, size: int, pairs: int) -> list[Row]:
    block = aligned(BLOCK)
    block.numpy()[:] = np.random.default_rng(0).integers(256, size=BLOCK, dtype=np.uint8)
    extents, copy, source = folder / "extents", folder / "copy", Path("/dev/shm") / f"espalier-bench-{os.getpid()}"

    def write() -> None:
        with ExtentWriter(extents) as writer:
            for number in range(size // BLOCK):
                writer.append(str(number), block)

    def read() -> None:
        with ExtentFile(extents) as file:
            for name in file:
                file.read_into(name, block)

    try:
        source.write_bytes(bytes(block.numpy()) * (size // BLOCK))  # from memory, as ours
        plain_write = partial(dd, f"if={source}", f"of={copy}", "oflag=direct", "conv=fdatasync")
        plain_read = partial(dd, f"if={copy}", "of=/dev/null", "iflag=direct")
        wrote = pairs_of(write, plain_write, pairs, size / 1e6)
        got = pairs_of(read, plain_read, pairs, size / 1e6)
    finally:
        source.unlink(missing_ok=True)
    return [
        compare("extents of 8 MiB written, with checksums", "dd oflag=direct", "MB/s", wrote),
        compare("extents of 8 MiB read and checked", "dd iflag=direct", "MB/s", got),
    ]


def random_rows(folder: Path, rows: int, pairs: int) -> list[Row]:
    layout, path = RowLayout(rows, torch.float32, (128,)), folder / "rows"
    chunk = torch.randn(16384, 128)
    with RowWriter(path, layout) as writer:
        for _ in range(rows // 16384):
            writer.append(chunk)
    drawn, out = np.random.default_rng(0), torch.empty(BATCH, 128)

    def plain() -> None:
        """pread of the row's page, by threads."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        starts = drawn.integers(rows, size=BATCH) * 512

        def some(part: np.ndarray) -> None:
            page = aligned(4096)
            view, target = memoryview(page.numpy()), out.numpy().view(np.uint8)
            for number in part.tolist():
                begin = int(starts[number])
                os.preadv(fd, [view], begin & ~4095)
                target[number] = page.numpy()[begin & 4095 : (begin & 4095) + 512]

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(some, np.array_split(np.arange(BATCH), THREADS)))
        os.close(fd)

    def mapped() -> None:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        table = np.memmap(path, np.float32, "r").reshape(rows, 128)
        np.take(table, drawn.integers(rows, size=BATCH), 0, out=out.numpy())

    found = []
    with IoQueue() as queue, IoQueue(ring=False) as threads:
        ring, pool = RowFile(path, layout, queue), RowFile(path, layout, threads)

        def read(table: RowFile) -> None:
            table.read(torch.from_numpy(drawn.integers(rows, size=BATCH)), out)

        peers = {
            f"preadv, {THREADS} Python threads": plain,
            f"the store's own {THREADS} threads, no io_uring": partial(read, pool),
            "memory map, cold": mapped,
        }
        for name, peer in peers.items():
            rates = pairs_of(partial(read, ring), peer, pairs, BATCH / 1e3)
            found.append(compare("rows of 512 B at random", name, "1000 rows/s", rates))
    return found


class Unordered:
    """A plain pool of threads that serves whoever comes first."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(8)

    def read(self, file: File, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._pool.submit(file.read_into, buffer, offset)

    def write(self, file: File, offset: int, buffer: torch.Tensor) -> Future[None]:
        return self._pool.submit(file.write_from, buffer, offset)

    def close(self) -> None:
        self._pool.shutdown()


def beside_writes(queue: IoQueue | Unordered, file: File, size: int) -> float:
    """Milliseconds of a read, in the mean, while writes wait."""
    block, page, taken = aligned(BLOCK), aligned(4096), []
    places = np.random.default_rng(0).integers(size // 4096, size=60) * 4096
    writes = [queue.write(file, at, block) for at in range(0, size, BLOCK)]
    for place in places.tolist():
        taken.append(seconds_of_read(queue, file, place, page))
        if all(write.done() for write in writes):
            break
        time.sleep(0.001)
    for write in writes:
        write.result()
    queue.close()
    return 1e3 * float(np.mean(taken))


def seconds_of_read(queue: IoQueue | Unordered, file: File, place: int, page: torch.Tensor) -> float:
    begin = time.perf_counter()
    queue.read(file, place, page).result()
    return time.perf_counter() - begin


def reads_beside_writes(folder: Path, size: int, pairs: int) -> list[Row]:
    with DirectFile(folder / "both", "create", size) as file:
        taken = []
        for _ in range(pairs):
            settle()
            taken.append((beside_writes(IoQueue(depth=1024), file, size), beside_writes(Unordered(), file, size)))
    case = f"read of 4 KiB while {size // BLOCK} writes of 8 MiB wait"
    return [compare(case, "8 threads, first come first served", "ms", taken, higher_is_better=False)]


def main() -> None:
    given = arguments(str(__doc__), folder={"help": "on the disk to measure"})
    pairs, size = given.pairs or (3 if given.quick else 7), (256 if given.quick else 512) << 20
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        rows = [
            *sequential(folder, size, pairs),
            *random_rows(folder, size // 512, pairs),
            *reads_beside_writes(folder, size // 2, pairs),
        ]
    publish(rows, given.json)


if __name__ == "__main__":
    main()
