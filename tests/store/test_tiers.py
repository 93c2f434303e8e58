"""Tiers hold the rows with the most expected accesses, count what came from where, and keep to their budget."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import UserError
from espalier.store import Budget, MemoryRows, RowFile, RowLayout, RowWriter, TieredRows, hot_rows

DATA = torch.randn(1000, 16)


@given(accesses=st.lists(st.integers(0, 5), min_size=1, max_size=50), count=st.integers(0, 50))
def test_hot_rows_are_those_with_the_most_accesses(accesses: list[int], count: int) -> None:
    plain = sorted(range(len(accesses)), key=lambda row: (-accesses[row], row))[:count]
    assert hot_rows(torch.tensor(accesses), count).tolist() == plain


def test_kept_rows_are_not_read_again() -> None:
    asked: list[int] = []

    class Counting(MemoryRows):
        def read(self, ids: torch.Tensor, out: torch.Tensor) -> None:
            asked.extend(ids.tolist())
            super().read(ids, out)

    expected = torch.zeros(1000)
    expected[torch.arange(0, 1000, 10)] = torch.arange(100.0)
    hot = hot_rows(expected, 100)
    tiers = TieredRows(Counting(DATA), [("cpu", hot[:30]), ("cpu", hot[30:])])
    assert sorted(asked) == sorted(hot.tolist())
    asked.clear()
    ids = torch.randint(1000, (400,))
    out = torch.empty(400, 16)
    tiers.read(ids, out)
    assert torch.equal(out, DATA[ids])
    assert asked == sorted(one for one in ids.tolist() if one % 10)
    assert sum(tiers.counts) == 400
    assert tiers.counts[2] == len(asked)
    assert tiers.counts[0] == int(torch.isin(ids, hot[:30]).sum())


def test_a_table_on_another_device_is_read_to_where_out_is() -> None:
    """`meta` stands for an accelerator: rows go there, and only their shape is known."""
    tiers = TieredRows(MemoryRows(DATA), [("meta", torch.arange(10)), ("cpu", torch.arange(10, 20))])
    out = torch.empty(3, 16, device="meta")
    tiers.read(torch.tensor([1, 12, 500]), out)
    assert tiers.counts == [1, 1, 1]


def test_a_budget_gives_what_it_has_and_names_the_least_that_would_do() -> None:
    budget = Budget(10 << 20, "store.memory")
    with budget.take(6 << 20, "hot rows"):
        assert budget.free == 4 << 20
        assert budget.taken == {"hot rows": 6 << 20}
        with pytest.raises(UserError, match=r"10\.0 MiB is too small: page buffers takes 5\.00 MiB") as error:
            budget.take(5 << 20, "page buffers")
        assert 'store.memory = "11MiB"' in str(error.value)
        assert "hot rows 6.00 MiB" in str(error.value)
    lease = budget.take(10 << 20, "everything")
    lease.give_back()
    lease.give_back()
    assert budget.free == 10 << 20


def test_tables_are_taken_from_the_budget_and_given_back() -> None:
    budget = Budget(1 << 20)
    with TieredRows(MemoryRows(DATA), [("cpu", torch.arange(500))], budget):
        assert budget.free <= (1 << 20) - 500 * 64
    assert budget.free == 1 << 20
    with pytest.raises(UserError, match="too small: rows in memory"):
        TieredRows(MemoryRows(DATA), [("cpu", torch.arange(500))], Budget(1 << 10))


READ = """
import sys, torch
from pathlib import Path
from espalier.store import Budget, RowFile, RowLayout, TieredRows, IoQueue, read_ahead

def resident():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(sys.argv[2]))

torch.set_num_threads(1)
ROWS, SIZE = 500_000, int(sys.argv[3])
generator = torch.Generator().manual_seed(0)
layout = RowLayout(ROWS, torch.float32, (64,))

def use(budget, hot, batches, most):
    queue = IoQueue()
    with RowFile(Path(sys.argv[1]), layout, queue, memory=4 << 20) as rows, budget.take(rows.memory, "page buffers"):
        with TieredRows(rows, [("cpu", hot)], budget) as tiers:
            schedule = (torch.randint(ROWS, (most,), generator=generator) for _ in range(batches))
            for out in read_ahead(tiers, schedule, most, budget=budget):
                assert bool((out[:, 0] == out[:, 1]).all())
                used = budget.size - budget.free
            after = resident()
    queue.close()
    return after, used

use(Budget(64 << 20), torch.arange(100), 3, 2000)  # libraries, kernels and threads are there
before = resident()
budget = Budget(SIZE)
hot = (SIZE - (14 << 20)) // (256 + 16)
after, used = use(budget, torch.arange(hot), 8, 5_000)
print((after - before) / used, used / SIZE)
"""


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Of a table of 128 MB, in a process of its own: what its peak grows by."""
    layout = RowLayout(500_000, torch.float32, (64,))
    with RowWriter(tmp_path / "rows", layout) as writer:
        for chunk in torch.arange(500_000.0).split(50_000):
            writer.append(chunk[:, None].expand(-1, 64).contiguous())
    command = [sys.executable, "-c", READ, tmp_path / "rows", "VmHWM", str(80 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    grown, used = map(float, done.stdout.split())
    assert grown <= 1.05
    assert 0.9 < used <= 1
    with RowFile(tmp_path / "rows", layout) as rows:
        out = torch.empty(2, 64)
        rows.read(torch.tensor([499_999, 5]), out)
        assert out[:, 63].tolist() == [499_999, 5]
