"""A queue moves the bytes that plain reads move, hands errors to those who wait, is bounded, and puts reads first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.store import PAGE, DirectFile, IoQueue, StripedFile, aligned
from espalier.store.io_queue import PIECE

SIZE = 2 * PIECE + 3 * PAGE + 17


def noise(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def queue() -> Iterator[IoQueue]:
    with IoQueue() as opened:
        yield opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DirectFile, torch.Tensor]]:
    data = noise(SIZE)
    with DirectFile(tmp_path_factory.mktemp("queue") / "file", "create") as opened:
        opened.write_from(data, 0)
        yield opened, data


@given(places=st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, 3 * PAGE)), max_size=20))
def test_many_reads_at_once_are_the_file(
    queue: IoQueue, file: tuple[DirectFile, torch.Tensor], places: list[tuple[int, int]]
) -> None:
    opened, data = file
    buffers = [torch.empty(min(size, SIZE - at), dtype=torch.uint8) for at, size in places]
    futures = [queue.read(opened, at, buffer) for (at, _), buffer in zip(places, buffers, strict=True)]
    for future, (at, _), buffer in zip(futures, places, buffers, strict=True):
        future.result(60)
        assert torch.equal(buffer, data[at : at + len(buffer)])


def test_long_transfers_on_several_disks_are_whole(queue: IoQueue, tmp_path: Path) -> None:
    data, back = noise(SIZE), torch.empty(SIZE, dtype=torch.uint8)
    with StripedFile([tmp_path / "a", tmp_path / "b"], "create") as opened:
        queue.write(opened, 0, data).result(60)
        queue.read(opened, 0, back).result(60)
    assert torch.equal(back, data)


def test_an_error_is_the_one_of_the_file(queue: IoQueue, file: tuple[DirectFile, torch.Tensor]) -> None:
    with pytest.raises(UserError, match="too short"):
        queue.read(file[0], SIZE - 1, aligned(2 * PIECE)).result(60)
    queue.read(file[0], SIZE - 17, aligned(PAGE), needed=17).result(60)


def test_several_callers_share_a_queue(queue: IoQueue, file: tuple[DirectFile, torch.Tensor]) -> None:
    opened, data = file
    wrong: list[int] = []

    def call(seed: int) -> None:
        places = torch.randint(SIZE - PAGE, (50,), generator=torch.Generator().manual_seed(seed)).tolist()
        for at in places:
            buffer = aligned(PAGE)
            queue.read(opened, at, buffer).result(60)
            wrong.extend([at] * (not torch.equal(buffer, data[at : at + PAGE])))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


class GatedFile(DirectFile):
    """Transfers wait for `gate`; `order` says in which order they began."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "create")
        self.gate, self.order = threading.Event(), list[str]()

    def read_into(self, buffer: torch.Tensor, offset: int, needed: int | None = None) -> None:
        self.order.append("read")
        self.gate.wait(60)

    def write_from(self, buffer: torch.Tensor, offset: int) -> None:
        self.order.append("write")
        self.gate.wait(60)


def test_reads_go_before_writes_that_waited_longer(tmp_path: Path) -> None:
    file, page = GatedFile(tmp_path / "file"), aligned(PAGE)
    with IoQueue(threads=1) as queue:
        first = queue.read(file, 0, page)
        while not file.order:
            pass
        waiting = [queue.write(file, 0, page) for _ in range(4)] + [queue.read(file, 0, page) for _ in range(40)]
        file.gate.set()
        wait([first, *waiting], 60)
    kinds = file.order
    assert kinds[1:8].count("read") >= 6
    assert "write" in kinds[:20], "writes go on while reads wait"
    assert (kinds.count("read"), kinds.count("write")) == (41, 4)
    file.close()


def test_writes_leave_threads_to_reads(tmp_path: Path) -> None:
    file, page = GatedFile(tmp_path / "file"), aligned(PAGE)
    with DirectFile(tmp_path / "other", "create", PAGE) as other, IoQueue(threads=4) as queue:
        writes = [queue.write(file, 0, page) for _ in range(8)]
        queue.read(other, 0, page).result(60)  # does not wait for any of them
        assert file.order.count("write") <= 1
        file.gate.set()
        wait(writes, 60)
    file.close()


def test_a_full_queue_lets_its_caller_wait(tmp_path: Path) -> None:
    file, page = GatedFile(tmp_path / "file"), aligned(PAGE)
    with IoQueue(depth=2, threads=1) as queue:
        timer = threading.Timer(0.2, file.gate.set)
        timer.start()
        begun = time.perf_counter()
        reads = [queue.read(file, 0, page) for _ in range(8)]
        assert time.perf_counter() - begun > 0.1
        wait(reads, 60)
        timer.join()
    file.close()


def test_closing_ends_the_threads_after_the_last_transfer(tmp_path: Path) -> None:
    before = threading.active_count()
    data = noise(SIZE)
    with DirectFile(tmp_path / "file", "create") as file:
        with IoQueue() as queue:
            futures = [queue.write(file, 0, data) for _ in range(3)]
        assert all(future.done() for future in futures)
        assert file.size > SIZE
    assert threading.active_count() == before


class Gated:
    """A file whose transfers end when they may."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_end = threading.Event()

    def parts(self, offset: int, count: int) -> list[Any]:
        return [(self, offset, count)]

    def write_from(self, piece: torch.Tensor, place: int) -> None:
        self.begun.append(place)
        self.may_end.wait(20.0)


def test_a_process_that_ends_waits_for_transfers_under_way_and_begins_no_other() -> None:
    queue, file = IoQueue(threads=1), Gated()
    first, second = (queue.write(file, place, torch.zeros(4096, dtype=torch.uint8)) for place in (0, 4096))  # type: ignore[arg-type]
    while not file.begun:
        time.sleep(0.001)
    threading.Timer(0.1, file.may_end.set).start()
    queue.leave(time.monotonic() + 20.0)
    assert (first.done(), second.done(), file.begun) == (True, False, [0])
    assert not any(one.is_alive() for one in queue._threads)
