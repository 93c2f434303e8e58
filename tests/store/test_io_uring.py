"""A ring reads what pread reads, and says which reads did not give all their bytes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.store import DirectFile, IoQueue, aligned, io_uring
from espalier.store.read_kernels import pread_runs

needs_ring = pytest.mark.skipif(not io_uring.available(), reason="the kernel has no io_uring, or forbids it")
SIZE = 10_000


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ring") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


@needs_ring
@given(
    reads=st.lists(st.tuples(st.integers(0, SIZE + 50), st.integers(1, 200)), max_size=60),
    depth=st.sampled_from([1, 4, 128]),
)
def test_a_ring_reads_what_pread_reads(file: Path, reads: list[tuple[int, int]], depth: int) -> None:
    runs = np.array([(at, size, 200 * number) for number, (at, size) in enumerate(reads)], np.int64).reshape(-1, 3)
    found = np.zeros((2, 200 * max(1, len(reads))), np.uint8)
    missed = np.zeros((2, len(reads)), np.int64)
    fd = os.open(file, os.O_RDONLY)
    ring = io_uring.Ring(depth)
    counts = (
        ring.read(fd, found[0].ctypes.data, runs, missed[0]),
        pread_runs(fd, found[1].ctypes.data, runs, missed[1]),
    )
    ring.close()
    os.close(fd)
    short = [number for number, (at, size) in enumerate(reads) if at + size > SIZE]
    for which in range(2):
        assert sorted(missed[which][: counts[which]].tolist()) == short
    assert np.array_equal(found[0], found[1])


@needs_ring
def test_a_ring_that_ended_misses_everything_and_does_not_hang(file: Path) -> None:
    ring = io_uring.Ring(4)
    fd = os.open(file, os.O_RDONLY)
    runs = np.array([(0, 10, 0)] * 7, np.int64)
    os.close(ring._fd)
    missed = np.zeros(7, np.int64)
    try:
        assert ring.read(fd, np.zeros(10, np.uint8).ctypes.data, runs, missed) == 7
        assert missed.tolist() == list(range(7))
    finally:
        ring._fd = -1
        os.close(fd)


def test_where_no_more_rings_are_given_pread_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(io_uring, "Ring", refused)
    runs = np.array([(4096 * page, 4096, 4096 * page) for page in (1, 0)], np.int64)
    with DirectFile(file, "read") as opened, IoQueue(ring=True) as queue:
        buffer = aligned(8192)
        queue.read_runs(opened, runs, buffer, SIZE).result(60)
    assert bytes(buffer.tolist()) == file.read_bytes()[:8192]


def test_where_the_kernel_refuses_threads_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(depth: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(io_uring, "Ring", refused)
    io_uring.available.cache_clear()
    try:
        assert not io_uring.available()
        with IoQueue() as queue:
            assert not queue.ring
    finally:
        io_uring.available.cache_clear()
