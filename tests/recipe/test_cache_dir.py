import os

import pytest

from espalier.recipe import cache_dir
from espalier.recipe.cache_dir import cache_folder, table


def test_the_cache_follows_xdg_and_ignores_a_relative_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "espalier"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "espalier"


def test_a_kept_table_that_cannot_be_read_is_empty(tmp_path):
    kept = tmp_path / "kept.json"
    assert table(kept) == {}
    for text in ("", "{", "[1]", "\xff"):
        kept.write_text(text, encoding="latin-1")
        assert table(kept) == {}
    kept.write_text('{"a": 1.5}')
    assert table(kept) == {"a": 1.5}


@pytest.mark.parametrize("links", [True, False])
def test_the_first_claim_of_a_file_stays_and_is_whole(links, tmp_path, monkeypatch):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no hard links")))
    assert cache_dir.claim(tmp_path / "owner", b"first", 0o600) == b"first"
    assert cache_dir.claim(tmp_path / "owner", b"second") == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["owner"]
    assert (tmp_path / "owner").stat().st_mode & 0o777 == 0o600


def test_a_claim_that_is_interrupted_leaves_nothing_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        cache_dir.claim(tmp_path / "owner", b"first")
    assert list(tmp_path.iterdir()) == []
