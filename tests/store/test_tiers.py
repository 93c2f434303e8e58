"""Every tier gives the rows it was made of, wherever they lie; a page that was changed is named; budgets are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.store import (
    Budget,
    ExtentFile,
    ExtentTier,
    IoQueue,
    MemoryTier,
    PageCache,
    PageTier,
    Tier,
    aligned,
    place_rows,
)
from espalier.store.extent_filler import ExtentFiller
from espalier.store.extents import DamagedExtent

ROWS, WIDTH = 300, 75
DATA = torch.randn(ROWS, WIDTH)
STORED = DATA.view(torch.uint8)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 300 bytes, which straddle pages, behind an extent of other bytes; each page has a checksum."""
    path = tmp_path_factory.mktemp("tiers") / "rows"
    with ExtentFiller(path, {"first": 5000, "rows": STORED.nbytes}) as filler:
        filler.hash_pages(["rows"])
        for name, data in (("first", torch.ones(5000, dtype=torch.uint8)), ("rows", STORED.reshape(-1))):
            for piece in data.split(4321):
                room = filler.room(name, len(piece))
                room.data.copy_(piece)
                filler.extend(name, room)
        filler.finish()
    return path


def pages(file: ExtentFile, queue: IoQueue, cached: int) -> Tier:
    return PageTier(file, "rows", 4 * WIDTH, queue, PageCache(cached), [np.arange(100)])


MADE: dict[str, Callable[[ExtentFile, IoQueue], Tier]] = {
    "memory": lambda file, queue: MemoryTier("host", STORED),
    "memory in another order": lambda file, queue: MemoryTier("host", STORED.flip(0), np.arange(ROWS)[::-1]),
    "extent": lambda file, queue: ExtentTier(file, "rows", 4 * WIDTH, queue),
    "pages": lambda file, queue: pages(file, queue, 0),
    "cached pages": lambda file, queue: pages(file, queue, 9),
}


@pytest.fixture(scope="module", params=MADE)
def tier(request: pytest.FixtureRequest, container: Path) -> Iterator[Tier]:
    with IoQueue() as queue, ExtentFile(container) as file:
        yield MADE[request.param](file, queue)


@settings(max_examples=20)
@given(ids=st.lists(st.integers(0, ROWS - 1), max_size=400), decoded=st.booleans())
def test_rows_of_a_tier_are_the_tables(tier: Tier, ids: list[int], decoded: bool) -> None:
    slots, places = np.array(ids, np.int64), np.random.default_rng(0).permutation(len(ids))
    fetched = tier.fetch(slots, aligned(tier.buffer_bytes(slots)))
    fetched.wait()
    out = torch.zeros(len(ids), WIDTH)
    decode = (lambda rows, values: values.copy_(rows.view(torch.float32))) if decoded else None
    place_rows(fetched, out, places, 4 * WIDTH, decode)
    assert torch.equal(out[places], DATA[slots])


def test_rows_of_another_device_are_placed_there() -> None:
    """`meta` stands for an accelerator: only shapes are known."""
    fetched = MemoryTier("device", STORED.to("meta")).fetch(np.array([1, 12]), torch.empty(0))
    out = torch.empty(3, WIDTH, device="meta")
    place_rows(fetched, out, np.array([2, 0]), 4 * WIDTH)
    assert dict(fetched.bytes) == {"device": 600}


@pytest.mark.parametrize("page", [0, 7, ROWS * 4 * WIDTH // 4096])
def test_a_changed_page_is_named_when_a_row_of_it_is_read(container: Path, tmp_path: Path, page: int) -> None:
    changed = tmp_path / "rows"
    data = bytearray(container.read_bytes())
    data[8192 + 4096 * page + 100] ^= 4
    changed.write_bytes(data)
    (tmp_path / "rows.index").write_bytes(container.with_name("rows.index").read_bytes())
    with IoQueue() as queue, ExtentFile(changed, "pack again") as file:
        tier = PageTier(file, "rows", 4 * WIDTH, queue, PageCache(0))
        slots = np.arange(ROWS)
        fetched = tier.fetch(slots, aligned(tier.buffer_bytes(slots)))
        with pytest.raises(DamagedExtent, match=rf"Extent 'rows'(.|\n)*page {page} \(of 22\)(.|\n)*try: pack again"):
            fetched.wait()
        others = slots[(slots * 300 // 4096 != page) & ((slots * 300 + 299) // 4096 != page)]
        tier.fetch(others, aligned(tier.buffer_bytes(others))).wait()


def test_a_budget_gives_what_it_has_and_names_the_least_that_would_do() -> None:
    budget = Budget(10 << 20)
    with budget.take(6 << 20, "hot rows"):
        assert budget.free == 4 << 20
        with pytest.raises(UserError, match=r"10\.0 MiB is too small: page buffers takes 5\.00 MiB") as error:
            budget.take(5 << 20, "page buffers")
        assert 'store.memory = "11MiB"' in str(error.value)
        assert "hot rows 6.00 MiB" in str(error.value)
    lease = budget.take(10 << 20, "everything")
    lease.close()
    lease.close()
    assert budget.free == 10 << 20
