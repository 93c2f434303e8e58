"""A container gives back what was appended, says which extent is damaged, and resumes after a kill byte for byte."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.store import PAGE, DamagedExtent, DiskFull, ExtentFile, ExtentWriter
from espalier.store.extents import index_path

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def container(path: Path, sizes: list[int]) -> list[torch.Tensor]:
    data = [noise(size, seed) for seed, size in enumerate(sizes)]
    with ExtentWriter(path) as writer:
        for number, one in enumerate(data):
            writer.append(f"batch {number}", one)
    return data


@given(
    shapes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 700)), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    disks=st.integers(1, 2),
)
def test_what_is_read_is_what_was_appended(tmp_path_factory, shapes, dtype: torch.dtype, disks: int) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.getbasetemp()
    where = [folder / f"striped-{k}" for k in range(disks)]
    data = [noise(a * b * dtype.itemsize, a + b).clamp_max(1).view(dtype).view(a, b) for a, b in shapes]
    with ExtentWriter(where) as writer:
        for number, one in enumerate(data):
            writer.append(str(number), one)
    with ExtentFile(where) as file:
        assert list(file) == [str(number) for number in range(len(data))]
        for number, one in enumerate(data):
            assert same(file.read(str(number)), one)
            assert file.offset(str(number)) % PAGE == 0
            assert file.bytes(str(number)) == one.nbytes
        assert file.damaged() == []


def test_a_scalar_and_a_name_written_twice(tmp_path: Path) -> None:
    with ExtentWriter(tmp_path / "file") as writer:
        writer.append("step", torch.tensor(1.5))
        writer.append("step", torch.tensor(2.5))
    with ExtentFile(tmp_path / "file") as file:
        assert same(file.read("step"), torch.tensor(2.5))
        assert len(file) == 1


def test_what_was_not_committed_is_not_there(tmp_path: Path) -> None:
    writer = ExtentWriter(tmp_path / "file")
    writer.append("a", noise(10))
    writer.commit()
    writer.append("b", noise(10))
    with ExtentFile(tmp_path / "file") as file:
        assert list(file) == ["a"]
        with pytest.raises(UserError, match="no extent 'b'") as error:
            file.read("b")
        assert "resume" in str(error.value)
    writer.close()


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = container(path, [5000, 5000, 5000])
    with path.open("r+b") as file:
        file.seek(2 * PAGE + 4999)
        byte = file.read(1)[0]
        file.seek(2 * PAGE + 4999)
        file.write(bytes([byte ^ 4]))
    with ExtentFile(path) as opened:
        assert opened.damaged() == ["batch 1"]
        with pytest.raises(DamagedExtent, match=r"'batch 1' of .*file is damaged"):
            opened.read("batch 1")
    with ExtentWriter(path, resume=True) as writer:
        writer.append("batch 1", data[1])
    with ExtentFile(path) as opened:
        assert opened.damaged() == []
        assert same(opened.read("batch 1"), data[1])


def test_a_torn_container_names_what_is_missing_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = container(path, [5000, 5000, 5000])
    whole = path.read_bytes()
    os.truncate(path, 5 * PAGE)
    with ExtentFile(path) as file:
        assert file.damaged() == ["batch 2"]
    with ExtentWriter(path, resume=True) as writer:
        assert "batch 1" in writer
        assert "batch 2" not in writer
        writer.append("batch 2", data[2])
    assert path.read_bytes() == whole


@given(cut=st.integers(0, 200), flip=st.booleans())
def test_a_torn_index_ends_at_its_last_whole_record(tmp_path_factory, cut: int, flip: bool) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.getbasetemp() / "torn"
    data = container(path, [100] * 5)
    index, whole = index_path(path), path.read_bytes()
    text = index.read_bytes()
    place = max(0, len(text) - 1 - cut)
    index.write_bytes(
        text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :] if flip and place > 20 else text[:place]
    )
    with ExtentWriter(path, resume=True) as writer:
        assert list(writer.extents) == [f"batch {k}" for k in range(len(writer.extents))]
        for number in range(len(writer.extents), 5):
            writer.append(f"batch {number}", data[number])
    assert path.read_bytes() == whole
    assert index.read_bytes() == text


def test_another_file_is_no_container(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read"):
        ExtentFile(tmp_path / "file")
    index_path(tmp_path / "file").write_bytes(b"something else")
    with pytest.raises(UserError, match="not the index"):
        ExtentFile(tmp_path / "file")
    with pytest.raises(UserError, match="does not exist"):
        ExtentFile(tmp_path / "none")


PACK = """
import sys, torch
from pathlib import Path
from espalier.store import ExtentWriter
writer = ExtentWriter(Path(sys.argv[1]), resume=True)
print("whole", len(writer.extents), flush=True)
for number in range(len(writer.extents), 120):
    generator = torch.Generator().manual_seed(number)
    data = torch.randint(256, (20_000 + 977 * number,), dtype=torch.uint8, generator=generator)
    writer.append(f"batch {number}", data)
    if number % 3 == 2:
        writer.commit()
writer.close()
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_again_and_again_makes_the_same_container(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PACK, tmp_path / "unbroken"], check=True, capture_output=True, timeout=120)
    chance, kills, done = random.Random(3), 0, False
    while not done:
        process = subprocess.Popen([sys.executable, "-c", PACK, tmp_path / "killed"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        if kills < 2:
            time.sleep(chance.uniform(0, 0.04))
            process.send_signal(signal.SIGKILL)
            kills += 1
        done = "done" in process.communicate(timeout=120)[0]
    for name in (lambda path: path, index_path):
        assert name(tmp_path / "killed").read_bytes() == name(tmp_path / "unbroken").read_bytes()


def test_a_full_disk_stops_cleanly_and_resumes(tmp_path: Path) -> None:
    program = f"""
import resource, sys
from pathlib import Path
import torch
from espalier.store import DiskFull, ExtentWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 4096, 20 * 4096))
writer = ExtentWriter(Path({str(tmp_path)!r}) / "file")
try:
    for number in range(9):
        writer.append(str(number), torch.full((3 * 4096,), number, dtype=torch.uint8))
except DiskFull as error:
    writer.close()
    print(error.what)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert f"{PAGE:,} bytes more" in done.stdout
    with ExtentWriter(tmp_path / "file", resume=True) as writer:
        assert list(writer.extents) == [str(number) for number in range(6)]
        writer.append("6", torch.full((3 * PAGE,), 6, dtype=torch.uint8))
    with ExtentFile(tmp_path / "file") as file:
        assert file.damaged() == []
        assert all(int(file.read(name)[0]) == int(name) for name in file)
    assert issubclass(DiskFull, UserError)
