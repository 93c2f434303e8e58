"""What a run keeps of its preprocessing: whole or not at all, and nowhere but in its folder."""

from __future__ import annotations

import base64
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from espalier.cli import run_data
from espalier.recipe import serialization
from espalier.recipe.errors import UserError
from espalier.train import run_folder as runs


def test_files_that_lead_out_of_the_folder_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = base64.b64encode(zlib.compress(serialization.dumps({"../../../out": b"x"}))).decode()
    with pytest.raises(UserError, match="in no run folder"):
        run_data.unpacked(data)
    assert not list(tmp_path.rglob("out"))


def test_hosts_that_share_a_cache_get_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = runs.RunFolder(tmp_path / "run")
    for turn in range(3):
        content = {str(number): f"{turn} {number}" for number in range(100)}
        folder.freeze(lambda place, of=content: [(place / name).write_text(one) for name, one in of.items()] and None)
        kept = folder.kept()
        assert kept is not None
        table = {one.name: one.read_bytes() for one in kept.iterdir()}
        text = base64.b64encode(zlib.compress(serialization.dumps(table))).decode()
        with ThreadPoolExecutor(4) as hosts:
            (place,) = set(hosts.map(run_data.unpacked, [text] * 4))
        assert place is not None
        assert {one.name: one.read_bytes() for one in place.iterdir()} == table
        assert [one.name for one in place.parent.iterdir()] == ["preprocessing"]


def test_a_killed_replacement_leaves_the_folder_that_was_there(tmp_path: Path) -> None:
    folder = runs.RunFolder(tmp_path)
    folder.freeze(lambda place: (place / "a").write_text("1") and None)

    def fails(place: Path) -> None:
        (place / "a").write_text("2")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="disk is full"):
        folder.freeze(fails)
    assert (tmp_path / "preprocessing" / "a").read_text() == "1"
    (tmp_path / "preprocessing").rename(tmp_path / "preprocessing.before")  # killed between the two renames
    assert folder.kept() == tmp_path / "preprocessing"
    assert {one.name for one in tmp_path.iterdir()} == {"preprocessing"}
