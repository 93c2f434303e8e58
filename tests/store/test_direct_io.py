"""Direct transfers move the bytes that plain ones move, at any offset and from any memory, and say what went wrong."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.store import PAGE, DirectFile, DiskFull, StripedFile, aligned, check_room
from espalier.store.cost import pages
from espalier.store.direct_io import HUGE, STRIPE

SHM = Path("/dev/shm")  # tmpfs: has no O_DIRECT before Linux 6.6, and buffers afterwards
SIZE = 5 * PAGE + 123


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DirectFile, torch.Tensor]]:
    path = tmp_path_factory.mktemp("direct") / "file"
    data = noise(SIZE)
    path.write_bytes(bytes(data.tolist()))
    with DirectFile(path, "read") as opened:
        yield opened, data


def test_memory_for_direct_transfers_is_aligned_and_zero() -> None:
    for size in (1, PAGE, PAGE + 1, 3 * PAGE, HUGE - 1, HUGE, 2 * HUGE + 1):
        memory = aligned(size)
        assert memory.data_ptr() % PAGE == 0
        assert len(memory) == pages(size)
        assert not memory.any()
    assert len(aligned(0)) == 0


@pytest.mark.parametrize("size", [HUGE + PAGE, 3 * HUGE - PAGE, 5 * PAGE])
def test_a_buffer_takes_its_own_pages_and_no_huge_page_beyond_them(size: int) -> None:
    def taken() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    before = taken()
    buffers = [aligned(size).fill_(1) for _ in range(20)]
    assert 20 * size <= taken() - before + HUGE
    assert taken() - before <= 20 * size + HUGE
    assert all(int(one[-1]) for one in buffers)


@given(offset=st.integers(0, SIZE - 1), size=st.integers(0, SIZE), shift=st.integers(0, 2))
def test_a_read_at_any_place_into_any_memory_is_the_file(
    file: tuple[DirectFile, torch.Tensor], offset: int, size: int, shift: int
) -> None:
    opened, data = file
    size = min(size, SIZE - offset)
    buffer = aligned(size + shift)[shift : shift + size]
    opened.read_into(buffer, offset)
    assert torch.equal(buffer, data[offset : offset + size])


def test_bytes_that_are_not_needed_may_lie_beyond_the_end(file: tuple[DirectFile, torch.Tensor]) -> None:
    opened, data = file
    buffer = aligned(2 * PAGE)
    opened.read_into(buffer, 4 * PAGE, needed=PAGE + 123)
    assert torch.equal(buffer[: PAGE + 123], data[4 * PAGE :])
    with pytest.raises(UserError, match="too short"):
        opened.read_into(buffer, 4 * PAGE, needed=PAGE + 124)


def test_a_read_beyond_the_end_says_how_many_bytes_are_missing(file: tuple[DirectFile, torch.Tensor]) -> None:
    for memory in (aligned(2 * PAGE), torch.empty(2 * PAGE, dtype=torch.uint8)[1:]):
        with pytest.raises(UserError, match="too short") as error:
            file[0].read_into(memory, 5 * PAGE)
        assert f"{len(memory) - 123} bytes are missing" in str(error.value)


@given(size=st.integers(1, 3 * PAGE), page=st.integers(0, 3), shift=st.integers(0, 1))
def test_a_write_fills_its_last_page_with_zeros(tmp_path_factory, size: int, page: int, shift: int) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.getbasetemp() / "written"
    data = aligned(size + shift)[shift : shift + size].copy_(noise(size))
    with DirectFile(path, "create") as opened:
        opened.write_from(data, page * PAGE)
        opened.sync()
    assert path.read_bytes() == bytes(page * PAGE) + bytes(data.tolist()) + bytes(-size % PAGE)


def test_any_dtype_and_shape_is_its_bytes(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int8):
        data = noise(8 * 33).view(dtype)
        with DirectFile(tmp_path / "file", "create") as opened:
            opened.write_from(data.view(3, -1), 0)
            back = torch.empty_like(data)
            opened.read_into(back, 0)
        assert torch.equal(back.view(torch.uint8), data.view(torch.uint8))


def test_tmpfs_holds_the_same_bytes(tmp_path: Path) -> None:
    data = noise(3 * PAGE + 7)
    name = f"espalier-direct-{os.getpid()}"
    try:
        for folder in (SHM, tmp_path):
            with DirectFile(folder / name, "create") as opened:
                opened.write_from(data, 0)
                back = aligned(PAGE)[:70]
                opened.read_into(back, 3 * PAGE - 63)
            assert torch.equal(back, data[-70:])
        assert (SHM / name).read_bytes() == (tmp_path / name).read_bytes()
    finally:
        (SHM / name).unlink()


def test_a_disk_that_takes_the_flag_but_not_the_transfer_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, data = os.preadv, noise(2 * PAGE)
    path = tmp_path / "file"
    path.write_bytes(bytes(data.tolist()))
    opened = DirectFile(path, "read")
    if not opened.direct:
        pytest.skip("the file system has no O_DIRECT")

    def refusing(fd, views, offset):  # type: ignore[no-untyped-def]
        if opened.direct:
            raise OSError(22, "Invalid argument")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    back = aligned(2 * PAGE)
    opened.read_into(back, 0)
    assert not opened.direct
    assert torch.equal(back, data)
    opened.close()


def test_a_full_disk_says_how_many_bytes_more(tmp_path: Path) -> None:
    """The limit on file sizes stands for a small disk; in a process of its own, where it ends."""
    program = f"""
import resource, torch
from pathlib import Path
from espalier.store import DirectFile, DiskFull, aligned
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
path = Path({str(tmp_path)!r}) / "file"
for size in (100_000, 0):
    try:
        DirectFile(path, "create", size).write_from(aligned(102400), 0)
    except DiskFull as error:
        print(error.what)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    first, second = done.stdout.splitlines()
    assert f"{100_000 - 65536:,} bytes more" in first
    assert f"{102400 - 65536:,} bytes more" in second
    assert (tmp_path / "file").stat().st_size == 65536
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 65536


def test_a_buffer_beyond_the_limit_on_memory_is_refused_with_its_size() -> None:
    program = """
import resource
from espalier.store import aligned
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    aligned(16 << 30)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("UserError There is no memory for a buffer of 16.0 GiB")


def test_a_file_larger_than_the_disk_is_refused_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a moment: other programs would find the disk full."""
    free = os.statvfs(tmp_path)
    more = free.f_bavail * free.f_frsize + (64 << 30)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("the rest of the disk was taken"))
    with pytest.raises(DiskFull, match="bytes more"):
        DirectFile(tmp_path / "file", "create", more)
    assert not (tmp_path / "file").exists()
    with pytest.raises(DiskFull, match="is full") as error:
        check_room(tmp_path, more, "the packed set")
    assert "the packed set takes" in str(error.value)


def test_a_full_small_disk_is_told_from_other_errors() -> None:
    small = SHM / f"espalier-full-{os.getpid()}"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, check=False
    )
    try:
        if mounted.returncode:
            pytest.skip("mounting needs root")
        with DirectFile(small / "file", "create") as opened, pytest.raises(DiskFull) as error:
            opened.write_from(aligned(3 << 20), 0)
        assert f"{2 << 20:,} bytes more" in error.value.what
        (small / "file").unlink()
        with pytest.raises(DiskFull, match=f"{2 << 20:,} bytes more"):
            DirectFile(small / "other", "create", 3 << 20)
    finally:
        subprocess.run(["umount", small], capture_output=True, check=False)
        small.rmdir()


def test_a_folder_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="cannot be written") as error:
            DirectFile(folder / "file", "create")
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    assert str(folder) in error.value.what
    with pytest.raises(UserError, match="does not exist"):
        DirectFile(tmp_path / "none" / "file", "create")
    with pytest.raises(UserError, match="does not exist"):
        DirectFile(tmp_path / "none", "read")


@settings(max_examples=25)
@given(offset=st.integers(0, STRIPE), size=st.integers(0, 3 * STRIPE), disks=st.integers(1, 3))
def test_a_striped_file_reads_as_one(tmp_path_factory, offset: int, size: int, disks: int) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.getbasetemp()
    paths = [folder / f"stripe-{disks}-{k}" for k in range(disks)]
    data = noise(4 * STRIPE + 5)
    if not paths[0].exists():
        with StripedFile(paths, "create") as opened:
            opened.write_from(data, 0)
    with StripedFile(paths, "read") as opened:
        back = torch.empty(size, dtype=torch.uint8)
        opened.read_into(back, offset)
        assert torch.equal(back, data[offset : offset + size])
        assert opened.size == 4 * STRIPE + PAGE


@given(size=st.integers(0, 8 * STRIPE))
def test_a_striped_file_is_cut_as_one(tmp_path_factory, size: int) -> None:  # type: ignore[no-untyped-def]
    paths = [tmp_path_factory.getbasetemp() / f"cut-{k}" for k in range(3)]
    with StripedFile(paths, "create") as opened:
        for number, file in enumerate(opened.files):
            os.truncate(file.path, 3 * STRIPE - (number == 2) * STRIPE)
        assert opened.size == 8 * STRIPE
        opened.truncate(size)
        assert opened.size == size
