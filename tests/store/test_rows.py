"""Rows of any size and order are the rows of the table; pages are read once, and exactly as many as predicted."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.store import PAGE, DirectFile, IoQueue, RowFile, RowLayout, RowWriter, padded
from espalier.store.row_kernels import merge_rows, scatter_rows

SIZES = (4, 100, 512, 5732, 1536, 4096, 8200)


class CountingQueue(IoQueue):
    """Counts the bytes that it is asked for."""

    bytes_read = 0

    def read_runs(self, file, runs, buffer, end):  # type: ignore[no-untyped-def]
        self.bytes_read += int(runs[:, 1].sum())
        return super().read_runs(file, runs, buffer, end)


@pytest.fixture(scope="module", params=["ring", "threads"])
def queue(request: pytest.FixtureRequest) -> Iterator[CountingQueue]:
    with CountingQueue(ring=request.param == "ring") as opened:
        if opened.ring and not IoQueue().ring:
            pytest.skip("the kernel has no io_uring")
        yield opened


def table(rows: int, size: int) -> torch.Tensor:
    return torch.randint(256, (rows, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def written(path: Path, data: torch.Tensor, offset: int = 0, stride: int = 0) -> RowLayout:
    """The plain form: the file made byte by byte."""
    layout = RowLayout(len(data), data.dtype, tuple(data.shape[1:]), offset, stride)
    content = np.full(layout.end, 7, np.uint8)
    flat = data.view(len(data), -1).view(torch.uint8).numpy()
    for number in range(len(data)):
        at = offset + number * layout.step
        content[at : at + layout.row_bytes] = flat[number]
    path.write_bytes(content.tobytes())
    return layout


def page_set(layout: RowLayout, ids: list[int]) -> set[int]:
    found: set[int] = set()
    for one in ids:
        begin = layout.offset + one * layout.step
        found |= set(range(begin // PAGE, (begin + layout.row_bytes - 1) // PAGE + 1))
    return found


@settings(max_examples=60)
@given(
    size=st.sampled_from(SIZES),
    ids=st.lists(st.integers(0, 299), max_size=400),
    offset=st.sampled_from([0, 128, PAGE]),
    padding=st.booleans(),
    memory=st.sampled_from([0, 1 << 16, 8 << 20]),
)
def test_rows_of_any_size_in_any_order_are_the_tables(
    queue: CountingQueue, tmp_path_factory, size: int, ids: list[int], offset: int, padding: bool, memory: int
) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.getbasetemp() / f"rows-{size}-{offset}-{padding}"
    data = table(300, size)
    layout = RowLayout(300, torch.uint8, (size,), offset, padded(size) if padding else 0)
    if not path.exists():
        assert written(path, data, offset, layout.stride) == layout
    with RowFile(path, layout, queue, memory) as rows:
        wanted = torch.tensor(ids, dtype=torch.int64)
        out = torch.full((len(ids), size), 9, dtype=torch.uint8)
        before = queue.bytes_read
        rows.read(wanted, out)
        assert torch.equal(out, data[wanted])
        assert queue.bytes_read - before == rows.pages(wanted) * PAGE
        if memory == 8 << 20:
            assert rows.pages(wanted) == len(page_set(layout, ids))


@given(
    size=st.integers(1, 3 * PAGE),
    stride=st.integers(0, 2 * PAGE),
    ids=st.lists(st.integers(0, 2**36), min_size=1, max_size=60).map(sorted),
    room=st.integers(5, 40),
)
def test_merged_reads_are_the_pages_of_the_rows_and_no_more(size: int, stride: int, ids: list[int], room: int) -> None:
    step, offset, longest = max(stride, size), 128, 6
    numbers, order = np.array(ids), np.arange(len(ids))
    runs, places = np.empty((room, 3), np.int64), np.empty(50, np.int64)
    rows, count, used = merge_rows(numbers, order, 0, offset, step, size, longest, runs, places)
    layout = RowLayout(2**36 + 1, torch.uint8, (size,), offset, step)
    read = [page for at, length, _ in runs[:count].tolist() for page in range(at // PAGE, (at + length) // PAGE)]
    assert rows > 0
    assert len(read) == used <= room
    assert sorted(set(read)) == read == sorted(page_set(layout, ids[:rows]))
    buffer_page = {page: k for k, page in enumerate(read)}
    assert [place for _, _, place in runs[:count].tolist()] == [
        buffer_page[at // PAGE] * PAGE for at in runs[:count, 0]
    ]
    for number, place in zip(ids[:rows], places[:rows].tolist(), strict=True):
        begin = offset + number * step
        assert place == buffer_page[begin // PAGE] * PAGE + begin % PAGE
    assert all(length <= max(longest, -(-size // PAGE) + 1) * PAGE for _, length, _ in runs[:count].tolist())


def test_rows_leave_a_buffer_where_they_belong() -> None:
    buffer = table(1, 1000)[0]
    places, order = torch.randint(990, (50,)), torch.randperm(60)[:50]
    out = torch.zeros(60, 10, dtype=torch.uint8)
    scatter_rows(buffer.data_ptr(), places.numpy(), order.numpy(), out.data_ptr(), 10)
    for place, at in zip(places.tolist(), order.tolist(), strict=True):
        assert torch.equal(out[at], buffer[place : place + 10])
    assert int((out != 0).any(1).sum()) <= 50


def test_padded_rows_never_straddle_a_page() -> None:
    for size in (*SIZES, 1, 2048, 2049, 4095, 4097):
        stride = padded(size)
        assert size <= stride
        assert stride % PAGE == 0 or PAGE % stride == 0
        assert stride < 2 * size or stride == PAGE or size > PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("stride", [0, PAGE])
def test_a_written_table_reads_back(queue: IoQueue, tmp_path: Path, dtype: torch.dtype, stride: int) -> None:
    data = table(700, 240).view(dtype).view(700, 3, -1)
    layout = RowLayout(700, dtype, tuple(data.shape[1:]), PAGE, stride)
    with RowWriter([tmp_path / "a", tmp_path / "b"], layout, memory=PAGE) as writer:
        for chunk in data.split(97):
            writer.append(chunk)
    with RowFile([tmp_path / "a", tmp_path / "b"], layout, queue) as rows:
        ids = torch.randperm(700)
        out = torch.empty_like(data)
        rows.read(ids, out)
        assert torch.equal(out.view(torch.uint8), data[ids].view(torch.uint8))
        assert (len(rows), rows.row_bytes, rows.shape, rows.dtype) == (700, 240, layout.shape, dtype)


def test_striped_rows_that_cross_disks(queue: IoQueue, tmp_path: Path) -> None:
    data = table(900, 8200)
    layout = RowLayout(900, torch.uint8, (8200,))
    paths = [tmp_path / str(disk) for disk in range(3)]
    with RowWriter(paths, layout) as writer:
        writer.append(data)
    with RowFile(paths, layout, queue) as rows:
        for ids in (torch.arange(900), torch.randint(900, (500,))):
            out = torch.empty(len(ids), 8200, dtype=torch.uint8)
            rows.read(ids, out)
            assert torch.equal(out, data[ids])


def test_a_file_shorter_than_its_rows_is_refused(tmp_path: Path) -> None:
    layout = written(tmp_path / "rows", table(10, 512))
    os.truncate(tmp_path / "rows", 5000)
    with pytest.raises(UserError, match=f"{10 * 512 - 5000} bytes") as error:
        RowFile(tmp_path / "rows", layout)
    assert str(tmp_path / "rows") in error.value.what


def test_a_file_cut_while_it_is_read_says_so(queue: IoQueue, tmp_path: Path) -> None:
    layout = written(tmp_path / "rows", table(1000, 512))
    with RowFile(tmp_path / "rows", layout, queue, memory=1 << 16) as rows:
        os.truncate(tmp_path / "rows", 20 * PAGE)
        out = torch.empty(1000, 512, dtype=torch.uint8)
        with pytest.raises(UserError, match="too short"):
            rows.read(torch.arange(1000), out)
        rows.read(torch.arange(160), out[:160])
        assert torch.equal(out[:160], table(1000, 512)[:160])


def test_threads_may_read_at_once(queue: IoQueue, tmp_path: Path) -> None:
    data = table(2000, 100)
    layout = written(tmp_path / "rows", data)
    wrong: list[int] = []
    with RowFile(tmp_path / "rows", layout, queue, memory=1 << 16) as rows:

        def call(seed: int) -> None:
            ids = torch.randint(2000, (500,), generator=torch.Generator().manual_seed(seed))
            out = torch.empty(500, 100, dtype=torch.uint8)
            for _ in range(5):
                rows.read(ids, out)
                wrong.extend([seed] * (not torch.equal(out, data[ids])))

        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_the_kernels_count_of_bytes_is_the_predicted_one(queue: IoQueue, tmp_path: Path) -> None:
    layout = written(tmp_path / "rows", table(40_000, 512))
    if not DirectFile(tmp_path / "rows", "read").direct:
        pytest.skip("the page cache would answer")
    with RowFile(tmp_path / "rows", layout, queue) as rows:
        ids = torch.randint(40_000, (3000,))
        out = torch.empty(3000, 512, dtype=torch.uint8)
        rows.read(ids[:10], out[:10])  # kernels are loaded
        before = disk_bytes()
        rows.read(ids, out)
        assert disk_bytes() - before == pytest.approx(rows.pages(ids) * PAGE, rel=0.02)


def disk_bytes() -> int:
    """Bytes that this process has caused to be read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@pytest.mark.slow
def test_a_table_of_512_gb_with_more_than_2_31_rows(queue: IoQueue, tmp_path: Path) -> None:
    """A sparse file: only the rows that are written take room."""
    layout = RowLayout(2**32, torch.float32, (32,))
    assert layout.end == 512 << 30
    ids = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30 + 77, 2**32 - 1])
    data = torch.randn(len(ids), 32)
    with open(tmp_path / "rows", "wb") as file:
        file.truncate(layout.end)
        for number, row in zip(ids.tolist(), data, strict=True):
            file.seek(number * 128)
            file.write(row.numpy().tobytes())
    with RowFile(tmp_path / "rows", layout, queue) as rows:
        order = torch.randperm(len(ids))
        others = torch.randint(2**32, (2000,))
        wanted = torch.cat([ids[order], others])
        out = torch.empty(len(wanted), 32)
        rows.read(wanted, out)
        assert torch.equal(out[: len(ids)], data[order])
        known = torch.isin(others, ids)
        assert not out[len(ids) :][~known].any()
        assert rows.pages(wanted) == len(page_set(layout, wanted.tolist()))
        with pytest.raises(UserError, match="no row 4294967296"):
            rows.read(torch.tensor([2**32]), out[:1])
