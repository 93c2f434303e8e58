import errno
import fcntl
import os
import threading
import time

import numpy as np
import pytest

from espalier.language import token_shards
from espalier.language.token_shards import SplitWriter, check, locked, placed, sweep
from espalier.language.tokenizer import ByteTokenizer
from espalier.recipe import data_hash
from espalier.recipe.errors import RunFailed, UserError


def test_a_split_is_cut_into_shards_of_one_size(tmp_path):
    writer = SplitWriter(tmp_path, "train", ByteTokenizer(), shard_tokens=10)
    for name, text in (("a", b"x" * 25), ("ü", b"y" * 3), ("c", b"z")):
        writer.add(name, np.frombuffer(text, np.uint8), len(text))
    split = writer.finish()
    assert (split.tokens, split.documents, split.bytes) == (32, 3, 29)
    assert [shard.bytes for shard in split.shards] == [10, 10, 10, 2]
    content = b"".join((tmp_path / shard.name).read_bytes() for shard in split.shards)
    assert content == b"\0" + b"x" * 25 + b"\0yyy\0z"
    assert np.fromfile(tmp_path / split.starts.name, "<i8").tolist() == [0, 26, 30]
    assert (tmp_path / split.names.name).read_text() == "aüc"
    assert all(data_hash.of_file(tmp_path / file.name) == file.hash for file in split.files)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    final = tmp_path / "store"

    def fail():
        with placed(final) as folder:
            (folder / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []
    with placed(final) as folder:
        (folder / "whole").write_text("x")
        assert not final.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    with placed(final) as folder:
        (folder / "newer").write_text("x")
    assert [path.name for path in final.iterdir()] == ["newer"]


@pytest.mark.parametrize(
    ("code", "says"), [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "disk is full"), (errno.EROFS, "Cannot write")]
)
def test_a_disk_that_refuses_is_the_users_error_and_leaves_nothing(tmp_path, code, says):
    def fail():
        with placed(tmp_path / "store") as folder:
            (folder / "half").write_text("x")
            raise OSError(code, os.strerror(code))

    with pytest.raises(UserError, match=rf"{says}(.|\n)*data\.cache"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_cache_below_a_file_is_the_users_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"Cannot write(.|\n)*data\.cache"), locked(tmp_path / "file" / "store"):
        pass


def test_the_lock_lets_one_in_at_a_time(tmp_path):
    inside, most = 0, 0

    def enter():
        nonlocal inside, most
        with locked(tmp_path / "store"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (inside, most) == (0, 1)


def test_waiting_for_a_silent_holder_ends_and_names_it(tmp_path):
    with locked(tmp_path / "store"):
        begun = time.monotonic()
        silent = rf"process {os.getpid()} on .*(.|\n)*no sign of life"
        with pytest.raises(RunFailed, match=silent), locked(tmp_path / "store", patience=0.2):
            pass
        assert 0.2 <= time.monotonic() - begun < 60


def test_a_holder_that_shows_life_is_waited_for(tmp_path):
    ready = threading.Event()
    begun = time.monotonic()

    def hold():
        with locked(tmp_path / "store") as alive:
            ready.set()
            for _ in range(30):
                time.sleep(0.02)
                alive()

    holder = threading.Thread(target=hold)
    holder.start()
    assert ready.wait(10)
    with locked(tmp_path / "store", patience=0.3):
        assert time.monotonic() - begun >= 0.55
    holder.join(10)


def test_sweeping_removes_leftovers_but_not_what_is_being_built(tmp_path):
    for name in ("dead", "busy"):
        (tmp_path / f"{name}{token_shards.BUILDING}").mkdir()
    with open(tmp_path / "busy.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(tmp_path)
        assert [path.name for path in tmp_path.glob("*" + token_shards.BUILDING)] == [f"busy{token_shards.BUILDING}"]
    sweep(tmp_path)
    assert list(tmp_path.glob("*" + token_shards.BUILDING)) == []


def test_check_names_the_file_at_fault(tmp_path):
    def split(name):
        writer = SplitWriter(tmp_path, name, ByteTokenizer(), shard_tokens=4)
        writer.add("a", np.frombuffer(b"0123456789", np.uint8), 10)
        return writer.finish()

    train, validation = split("train"), split("validation")
    index = token_shards.Index(1, "bytes-1", "|u1", 4, train, validation, "", (), 0, ())
    check(tmp_path, index, hashes=True)
    (tmp_path / "train-00001.bin").write_bytes(b"345!")
    check(tmp_path, index, hashes=False)
    with pytest.raises(token_shards.Damaged, match=r"train-00001\.bin has changed content"):
        check(tmp_path, index, hashes=True)
    (tmp_path / "validation.names").write_bytes(b"")
    with pytest.raises(token_shards.Damaged, match=r"validation\.names has 0 bytes, not 1"):
        check(tmp_path, index, hashes=False)
