"""A disk is measured past the page cache where that is possible, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from espalier.machine import disk

SIZE = 16 * 2**20


def test_a_disk_has_speeds_and_keeps_no_file(tmp_path: Path) -> None:
    found, notes = disk.measure(tmp_path, SIZE, 0.05)
    assert found is not None
    assert min(found.write, found.read, found.iops, found.iops_parallel) > 0
    assert found.path == str(tmp_path.resolve())
    assert found.direct == (notes == ())
    assert list(tmp_path.iterdir()) == []


def test_where_o_direct_is_refused_the_cache_is_used_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path, flags, *rest, **named):  # type: ignore[no-untyped-def]
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    found, notes = disk.measure(tmp_path, SIZE, 0.05)
    assert found is not None
    assert not found.direct
    assert "refuses O_DIRECT" in notes[0]


def test_a_disk_that_takes_the_flag_but_not_the_transfer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def refusing(fd: int, block, at: int) -> int:  # type: ignore[no-untyped-def]
        if len(block) == disk.PAGE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, block, at)

    monkeypatch.setattr(os, "pwrite", refusing)
    found, _ = disk.measure(tmp_path, SIZE, 0.02)
    assert found is not None
    assert not found.direct


def test_a_folder_that_cannot_be_written_is_said() -> None:
    found, notes = disk.measure(Path("/no/such/folder"), SIZE, 0.02)
    assert found is None
    assert "/no/such/folder" in notes[0]


def test_a_nearly_full_disk_is_left_alone(tmp_path: Path) -> None:
    found, notes = disk.measure(tmp_path, 2**60, 0.02)
    assert found is None
    assert "free" in notes[0]
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_is_killed_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[list[Path]] = []

    def looked(*_: object, **named: int) -> float:
        names.append(list(tmp_path.iterdir()))
        return 1.0

    monkeypatch.setattr(disk, "_random", looked)
    disk.measure(tmp_path, SIZE, 0.02)
    assert names == [[], []]
