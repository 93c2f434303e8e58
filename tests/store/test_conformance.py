"""Every answer to `Rows` is the tensor it was made from: one suite over tables in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.store import IoQueue, MemoryRows, RowFile, RowLayout, Rows, RowWriter, padded

ROWS = 500
DATA = {
    "fp32": torch.randn(ROWS, 25),
    "bf16": torch.randn(ROWS, 2, 33).bfloat16(),
    "int64": torch.randint(-(2**62), 2**62, (ROWS,)),
    "wide": torch.randn(ROWS, 2050),
    "int8": torch.randint(-128, 128, (ROWS, 1), dtype=torch.int8),
}


def in_memory(data: torch.Tensor, folder: Path, queue: IoQueue) -> Rows:
    return MemoryRows(data)


def on_disk(data: torch.Tensor, folder: Path, queue: IoQueue, stride: int = 0, disks: int = 1) -> Rows:
    layout = RowLayout(len(data), data.dtype, tuple(data.shape[1:]), stride=stride)
    where = [folder / str(disk) for disk in range(disks)]
    with RowWriter(where, layout) as writer:
        writer.append(data)
    return RowFile(where, layout, queue, memory=1 << 18)


def on_padded_disk(data: torch.Tensor, folder: Path, queue: IoQueue) -> Rows:
    return on_disk(data, folder, queue, stride=padded(data[0].nbytes))


def on_two_disks(data: torch.Tensor, folder: Path, queue: IoQueue) -> Rows:
    return on_disk(data, folder, queue, disks=2)


ANSWERS: list[Callable[..., Rows]] = [in_memory, on_disk, on_padded_disk, on_two_disks]


@pytest.fixture(scope="module", params=[f"{answer.__name__} {kind}" for answer in ANSWERS for kind in DATA])
def table(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Rows, torch.Tensor]]:
    name, kind = request.param.split()
    make = next(answer for answer in ANSWERS if answer.__name__ == name)
    with IoQueue() as queue:
        yield make(DATA[kind], tmp_path_factory.mktemp("rows"), queue), DATA[kind]


def test_it_knows_its_shape(table: tuple[Rows, torch.Tensor]) -> None:
    rows, data = table
    assert (len(rows), rows.dtype, rows.shape) == (len(data), data.dtype, tuple(data.shape[1:]))
    assert rows.row_bytes == data[0].nbytes


@settings(max_examples=25)
@given(ids=st.lists(st.integers(0, ROWS - 1), max_size=700))
def test_rows_in_any_order_with_repeats_are_the_tensors(table: tuple[Rows, torch.Tensor], ids: list[int]) -> None:
    rows, data = table
    wanted = torch.tensor(ids, dtype=torch.int64)
    out = torch.empty((len(ids), *rows.shape), dtype=rows.dtype)
    rows.read(wanted, out)
    assert torch.equal(out.view(torch.int8), data[wanted].view(torch.int8))


def test_a_number_that_is_no_row_is_refused(table: tuple[Rows, torch.Tensor]) -> None:
    rows, _ = table
    out = torch.empty((2, *rows.shape), dtype=rows.dtype)
    for wrong in (-1, ROWS):
        with pytest.raises(UserError, match=f"no row {wrong}: the table has {ROWS}"):
            rows.read(torch.tensor([3, wrong]), out)


def test_what_does_not_fit_is_our_mistake(table: tuple[Rows, torch.Tensor]) -> None:
    rows, _ = table
    with pytest.raises(AssertionError, match="out is"):
        rows.read(torch.tensor([1]), torch.empty((2, *rows.shape), dtype=rows.dtype))
    with pytest.raises(AssertionError, match="ids are"):
        rows.read(torch.tensor([1], dtype=torch.int32), torch.empty((1, *rows.shape), dtype=rows.dtype))
