import errno
import os
import resource
import shutil

import pytest
import torch
from safetensors.torch import save_file

from espalier.recipe import cache_dir
from espalier.recipe.cache_dir import cache_folder, table, writing
from espalier.recipe.errors import UserError


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


def test_a_writer_names_the_path_what_the_disk_lacks_and_the_remedy_before_it_writes(tmp_path, monkeypatch):
    there = tmp_path / "not made" / "yet"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with (
        pytest.raises(UserError, match=rf"(?s)The disk of {there} is full: 1,048 bytes more.*another cup"),
        writing(there, "take another cup", lambda: 2048),
    ):
        raise AssertionError("something is written")
    with writing(there, size=lambda: 1000):
        pass


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_an_error_of_the_system_is_the_users_also_where_a_library_has_wrapped_it(code, wrapped, tmp_path):
    def write():
        try:
            raise OSError(code, os.strerror(code))
        except OSError as error:
            if wrapped:
                raise RuntimeError("a write failed") from error
            raise

    says = "Cannot write" if code == errno.EROFS else "The disk is full"
    with pytest.raises(UserError, match=says) as told, writing(tmp_path / "it"):
        write()
    assert os.strerror(code) in str(told.value)
    assert str(tmp_path / "it") in str(told.value)


def test_other_errors_of_writers_stay_as_they_are(tmp_path):
    for error in (ValueError("no"), UserError("A sentence."), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, writing(tmp_path):
            raise error
        assert raised.value is error


def test_a_limit_that_safetensors_meets_is_the_users(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(UserError, match="The disk is full"), writing(tmp_path):
            save_file({"x": torch.ones(1 << 16)}, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
