from espalier.cache_dir import cache_folder, table


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
