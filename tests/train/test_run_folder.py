"""The folder of a run that was refused before it began."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from espalier.train import run_folder


def refused(path: Path) -> None:
    folder = run_folder.lock_folder(path)
    folder.discard_if_empty()
    folder.release()


def test_an_empty_folder_is_removed_and_one_with_files_stays(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    for name in ("run", "other"):
        refused(tmp_path / name)
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "other" / "notes.txt").exists()


def test_a_mounted_disk_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the refusal is what is said."""

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(Path, "rmdir", busy)
    refused(tmp_path / "run")
    assert (tmp_path / "run").is_dir()
