"""Generations hold a whole step after a crash at any moment, and go back a step where the last one is damaged."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.store import PAGE, DamagedExtent, Generations, aligned
from espalier.store import generations as module

SIZES = {"layer 0": 5000, "layer 1": 4096, "norm": 4, "head": 3 * PAGE + 1}


def filled(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value % 251, dtype=torch.uint8)


def write_all(store: Generations, value: int) -> None:
    for name, size in store.sizes.items():
        store.write(name, filled(size, value))


def values(store: Generations) -> set[int]:
    found = set()
    for name, size in store.sizes.items():
        buffer = aligned(size)
        store.read(name, buffer)
        found |= set(buffer[:size].tolist())
    return found


@given(
    writes=st.lists(
        st.tuples(st.sampled_from([*SIZES, "commit", "open", "rollback"]), st.integers(0, 250)), max_size=40
    ),
    generations=st.integers(2, 3),
)
def test_any_history_reads_as_a_table_in_memory(tmp_path_factory, writes, generations: int) -> None:  # type: ignore[no-untyped-def]
    """The plain form: a dict that is copied at each commit."""
    path = tmp_path_factory.getbasetemp() / "history"
    store = Generations.create(path, SIZES, generations)
    committed: dict[str, int] = {}
    now, step = dict(committed), -1
    for what, value in writes:
        if what in SIZES:
            store.write(what, filled(SIZES[what], value))
            now[what] = value
        elif what == "commit":
            step += 1
            store.commit(step)
            committed = dict(now)
        elif what == "rollback":
            store.rollback()
            now = dict(committed)
        else:
            store.close()
            store, now = Generations(path), dict(committed)
        assert store.step == step
        assert {name for name in SIZES if store.written(name)} == committed.keys()
        assert {name for name in SIZES if store.written(name, pending=True)} == now.keys()
        for pending, table in ((False, committed), (True, now)):
            for name, known in table.items():
                buffer = torch.empty(SIZES[name], dtype=torch.uint8)
                store.read(name, buffer, pending)
                assert torch.equal(buffer, filled(SIZES[name], known))
    store.close()


def test_one_generation_is_rewritten_in_place(tmp_path: Path) -> None:
    with Generations.create(tmp_path / "one", SIZES, 1) as store, Generations.create(tmp_path / "two", SIZES) as two:
        for step in range(3):
            write_all(store, step)
            store.commit(step)
            assert values(store) == {step}
        assert (tmp_path / "two").stat().st_size - (tmp_path / "one").stat().st_size == 8 * PAGE
        assert two.step == -1


def test_what_was_never_written_is_said(tmp_path: Path) -> None:
    with (
        Generations.create(tmp_path / "file", SIZES) as store,
        pytest.raises(UserError, match=r"'norm' .*never written"),
    ):
        store.read("norm", aligned(4))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def place(store: Generations, name: str) -> int:
    return store._layout.at(name, store._committed[name][0])


def test_a_flipped_bit_is_named_and_the_step_before_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with Generations.create(path, SIZES) as store:
        for step in range(3):
            write_all(store, 10 + step)
            store.commit(step)
        flip(path, place(store, "layer 1") + 7)
        with pytest.raises(DamagedExtent, match=r"'layer 1' of .*file is damaged") as error:
            values(store)
        assert "step 2" in str(error.value)
    with Generations(path, verify=True) as store:
        assert store.step == 1
        assert "'layer 1'" in store.restored
        assert values(store) == {11}
        write_all(store, 99)  # overwrites the damaged step, and is lost in a crash
    with Generations(path) as store:
        assert store.step == 1
        assert values(store) == {11}
        write_all(store, 12)
        store.commit(2)
    with Generations(path, verify=True) as store:
        assert (store.step, store.restored, values(store)) == (2, "", {12})


def test_a_flipped_bit_in_the_newest_header_is_told_and_the_step_before_holds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with Generations.create(path, SIZES) as store:
        for step in range(2):
            write_all(store, 10 + step)
            store.commit(step)
        flip(path, store._layout.header_at(store._header) + 20)
    with Generations(path, verify=True) as store:
        assert "header of the step after 0 is not whole" in store.restored
        assert (store.step, values(store)) == (0, {10})


def test_where_no_step_is_whole_the_damaged_extent_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with Generations.create(path, SIZES) as store:
        for step in range(2):
            write_all(store, step)
            store.commit(step)
            flip(path, place(store, "head"))
    with pytest.raises(DamagedExtent, match="'head'"):
        Generations(path, verify=True)


def test_a_torn_header_leaves_the_step_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with Generations.create(path, SIZES) as store:
        for step in range(2):
            write_all(store, step)
            store.commit(step)
        newest = store._layout.header_at(store._header)
    flip(path, newest + 30)
    with Generations(path) as store:
        assert store.step == 0
        assert values(store) == {0}
        other = store._layout.header_at(store._header)
    flip(path, other + 30)
    with pytest.raises(UserError, match="no whole step"):
        Generations(path)


def test_short_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    Generations.create(path, SIZES).close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)
    with pytest.raises(UserError, match="too short: 10 bytes"):
        Generations(path)
    flip(path, len(module.MAGIC) + 20)
    with pytest.raises(UserError, match=r"table .* damaged"):
        Generations(path)
    for content in (b"", b"x" * 9000):
        path.write_bytes(content)
        with pytest.raises(UserError, match="holds no generations"):
            Generations(path)


def test_the_step_before_comes_back_until_something_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with Generations.create(path, SIZES) as store:
        with pytest.raises(UserError, match="no longer holds"):
            store.revert()
        for step in range(3):
            write_all(store, step)
            store.commit(step)
        store.revert()
        assert (store.step, values(store)) == (1, {1})
    with Generations(path) as store:
        assert (store.step, values(store)) == (1, {1})
        write_all(store, 7)
        store.commit(2)
        store.write("norm", filled(4, 9))
        with pytest.raises(UserError, match="no longer holds the step before 2"):
            store.revert()
        assert values(store) == {7}


def test_a_step_that_is_not_whole_is_not_gone_back_to(tmp_path: Path) -> None:
    with Generations.create(tmp_path / "file", SIZES) as store:
        for step in range(2):
            write_all(store, step)
            store.commit(step)
        store.write("norm", filled(4, 9))  # over that of step 0
    with Generations(tmp_path / "file") as store:
        with pytest.raises(DamagedExtent, match="'norm'"):
            store.revert(verify=True)
        assert (store.step, values(store)) == (1, {1})
        store.commit(2)
        store.revert(verify=True)
        assert (store.step, values(store)) == (1, {1})


def test_state_may_lie_on_several_disks(tmp_path: Path) -> None:
    where = [tmp_path / "a", tmp_path / "b"]
    sizes = {"embedding": 9 << 20, "norm": 4}
    with Generations.create(where, sizes) as store:
        for step in range(3):
            write_all(store, step)
            store.commit(step)
    with Generations(where, verify=True) as store:
        assert (store.step, store.restored, values(store)) == (2, "", {2})


def test_threads_may_write_different_extents_at_once(tmp_path: Path) -> None:
    with Generations.create(tmp_path / "file", {str(k): 70_000 + k for k in range(8)}) as store:
        for step in range(3):
            threads = [
                threading.Thread(target=store.write, args=(name, filled(size, step)))
                for name, size in store.sizes.items()
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            store.commit(step)
            assert values(store) == {step}


OPTIMIZE = """
import sys, torch
from pathlib import Path
from espalier.store import Generations
path = Path(sys.argv[1])
store = Generations(path) if path.exists() else Generations.create(path, {str(k): 30_000 + k for k in range(12)})
print("open", flush=True)
while True:
    step = store.step + 1
    for name, size in store.sizes.items():
        store.write(name, torch.full((size,), step % 251, dtype=torch.uint8))
    store.commit(step)
"""


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_a_whole_step(tmp_path: Path) -> None:
    path, chance, last = tmp_path / "file", random.Random(5), -1
    Generations.create(path, {str(k): 30_000 + k for k in range(12)}).close()
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", OPTIMIZE, path], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0.02, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        with Generations(path) as store:
            assert store.step >= last
            last = store.step
            if last >= 0:
                assert values(store) == {last % 251}
    assert last > 3
