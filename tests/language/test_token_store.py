import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.language import token_shards, token_store
from espalier.language.token_store import build, build_all
from espalier.recipe import Data
from espalier.recipe.errors import UserError


def corpus(folder, documents=60, seed=0):
    """Files of random lines, 1 to 40 each."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        lines = (f"{draw.random()} ü" for _ in range(draw.randint(1, 40)))
        (folder / f"{number:03d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def data(tmp_path):
    return Data(path=str(corpus(tmp_path / "corpus")), validation=0.2, cache=str(tmp_path / "cache"))


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(token_shards, "SHARD_TOKENS", 1000)


def stores(cache):
    return [path for path in (Path(cache) / "tokens").iterdir() if path.is_dir()]


def texts(split, tokenizer):
    """Document name -> text, from the tokens alone."""
    ids = split.read(0, split.tokens)
    starts = [*np.flatnonzero(ids == tokenizer.boundary).tolist(), split.tokens]
    return {
        split.documents_in(start, start + 1)[0]: tokenizer.decode(ids[start:stop]) for start, stop in pairwise(starts)
    }


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_the_store_gives_back_every_document(data, small_shards, tokenizer):
    data = msgspec.structs.replace(data, tokenizer=tokenizer)
    store = build(data)
    train, held_out = texts(store.train, store.tokenizer), texts(store.validation, store.tokenizer)
    assert train | held_out == {path.name: path.read_text() for path in Path(data.path).iterdir()}
    assert train.keys().isdisjoint(held_out)
    assert (store.train.documents, store.validation.documents) == (len(train), len(held_out))
    sizes = [sum(len(text.encode()) for text in side.values()) for side in (train, held_out)]
    assert [store.train.bytes, store.validation.bytes] == sizes
    lengths = store.tokenizer.byte_lengths[store.train.read(0, store.train.tokens)]
    assert lengths.sum() == store.train.bytes
    assert len(list(stores(data.cache)[0].glob("train-*.bin"))) > 3


@pytest.fixture(scope="module")
def cut_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_shards, "SHARD_TOKENS", 97)
        return build(Data(path=str(corpus(folder / "corpus", 20)), validation=0.2, cache=str(folder / "cache")))


@given(draw=st.data())
def test_reads_do_not_feel_shard_edges(cut_store, draw):
    split = cut_store.train
    files = sorted(cut_store.path.glob("train-*.bin"))
    whole = np.concatenate([np.fromfile(file, np.uint8) for file in files])
    start = draw.draw(st.integers(0, split.tokens))
    count = draw.draw(st.integers(0, min(500, split.tokens - start)))
    np.testing.assert_array_equal(split.read(start, count), whole[start : start + count])


def test_reads_within_a_shard_are_views_and_read_only(cut_store):
    view = cut_store.train.read(3, 10)
    assert not view.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_window_names_all_its_documents(cut_store):
    split = cut_store.train
    names = split.documents_in(0, split.tokens)
    assert len(names) == split.documents == len(set(names))
    assert names == sorted(names)
    second = int(np.flatnonzero(split.read(0, split.tokens) == 0)[1])
    assert split.documents_in(second - 1, second) == names[:1]
    assert split.documents_in(second - 1, second + 1) == names[:2]
    assert split.documents_in(second, second + 1) == names[1:2]
    assert split.documents_in(split.tokens - 1, split.tokens) == names[-1:]


@settings(max_examples=15, deadline=None)
@given(contents=st.lists(st.integers(0, 12), min_size=2, max_size=40), share=st.floats(0.01, 0.99))
def test_no_content_is_on_both_sides_and_both_have_some(tmp_path_factory, contents, share):
    folder = tmp_path_factory.mktemp("split")
    (folder / "d.jsonl").write_bytes(b"\n".join(msgspec.json.encode({"text": f"text {one}"}) for one in contents))
    data = Data(path=str(folder / "d.jsonl"), validation=share, cache=str(folder / "cache"))
    if len(set(contents)) == 1:
        with pytest.raises(UserError, match=rf"too small.* {len(contents)} documents"):
            build(data)
        return
    store = build(data)
    train, held_out = (set(texts(split, store.tokenizer).values()) for split in (store.train, store.validation))
    assert train
    assert held_out
    assert train.isdisjoint(held_out)
    assert store.train.documents + store.validation.documents == len(contents)


def test_the_split_depends_on_content_not_on_names(data, tmp_path):
    first = build(data)
    for path in Path(data.path).iterdir():
        path.rename(path.with_name("x" + path.name))
    second = build(data)
    assert second.path != first.path
    assert {"x" + name for name in texts(first.validation, first.tokenizer)} == set(
        texts(second.validation, second.tokenizer)
    )


def test_a_small_corpus_still_has_something_held_out_and_says_so(tmp_path):
    path = corpus(tmp_path / "corpus", documents=3)
    store = build(Data(path=str(path), validation=1e-6), tmp_path / "cache")
    assert (store.train.documents, store.validation.documents) == (2, 1)
    assert "left no document of 3" in store.notes[0]
    store = build(Data(path=str(path), validation=1 - 1e-6), tmp_path / "cache")
    assert (store.train.documents, store.validation.documents) == (1, 2)


def test_a_single_document_is_cut_at_a_line_end_and_says_so(tmp_path):
    text = "\n".join(f"line {number} é" for number in range(200))
    (tmp_path / "one.txt").write_text(text)
    store = build(Data(path=str(tmp_path / "one.txt"), validation=0.1), tmp_path / "cache")
    train, held_out = (store.tokenizer.decode(s.read(0, s.tokens)) for s in (store.train, store.validation))
    assert train + held_out == text
    assert train.endswith("\n")
    assert 0.09 < len(held_out) / len(text) < 0.12
    assert "a single document" in store.notes[0]


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.sampled_from("aé🌳\n"), min_size=1, max_size=12), share=st.floats(0.01, 0.99))
def test_any_single_document_is_cut_between_characters_or_refused(tmp_path_factory, text, share):
    folder = tmp_path_factory.mktemp("cut")
    (folder / "one.txt").write_bytes(text.encode())
    data = Data(path=str(folder / "one.txt"), validation=share, cache=str(folder / "cache"))
    if len(text) == 1:
        with pytest.raises(UserError, match="too small"):
            build(data)
        return
    store = build(data)
    sides = [bytes(s.read(1, s.tokens - 1)).decode() for s in (store.train, store.validation)]
    assert "".join(sides) == text
    assert all(sides)


def test_the_fingerprint_ignores_folders_and_times_but_not_content(data, tmp_path):
    first = build(data)
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(data.path, moved)
    os.utime(moved / "000.txt", (1, 1))
    second = build(msgspec.structs.replace(data, path=str(moved)))
    assert (second.fingerprint, second.train.fingerprint) == (first.fingerprint, first.train.fingerprint)
    assert second.path != first.path
    (moved / "000.txt").write_text("other")
    assert build(msgspec.structs.replace(data, path=str(moved))).fingerprint != first.fingerprint


def test_a_store_is_built_once_and_progress_reaches_the_end(data):
    calls = []
    first = build(data, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == sum(path.stat().st_size for path in Path(data.path).iterdir())
    again = build(data, progress=lambda *_: pytest.fail("built again"))
    assert again.path == first.path
    assert again.fingerprint == first.fingerprint


def test_what_was_skipped_is_remembered(data):
    (Path(data.path) / "image.png").write_bytes(b"\x89PNG\0")
    for store in (build(data), build(data)):
        assert store.skipped == (("image.png", "binary (NUL byte)"),)
        assert store.skipped_documents == 1


@pytest.mark.parametrize("victim", ["train-00002.bin", "validation.names", "train.starts", "index.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_a_damaged_store_is_named_and_built_again(data, small_shards, victim, harm):
    first = build(data)
    path = first.path / victim
    content = path.read_bytes()
    flipped = content.replace(b'"version"', b'"verzion"') if victim == "index.json" else content[:-1] + b"\x7f"
    path.unlink()
    if harm != "remove":
        path.write_bytes(flipped if harm == "flip" else content[:-2])
    again = build(data)
    assert again.fingerprint == first.fingerprint
    assert victim in again.notes[0]
    assert path.read_bytes().startswith(content[:10])
    token_shards.check(again.path, token_shards.read_index(again.path), hashes=True)


def test_large_stores_are_hashed_by_check(data, monkeypatch):
    monkeypatch.setattr(token_store, "CHECKED_AT_OPEN", 0)
    store = build(data)
    token_shards.check(store.path, token_shards.read_index(store.path), hashes=True)
    shard = store.path / "train-00000.bin"
    shard.write_bytes(b"!" * shard.stat().st_size)
    assert build(data).path == store.path  # only looked at
    with pytest.raises(token_shards.Damaged, match=r"train-00000\.bin has changed content"):
        token_shards.check(store.path, token_shards.read_index(store.path), hashes=True)


def test_a_full_disk_leaves_nothing_half_written(data, monkeypatch):
    written = 0
    real = token_shards._Hashed.write

    def write(self, content):
        nonlocal written
        written += len(content)
        if written > 10_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, content)

    monkeypatch.setattr(token_shards._Hashed, "write", write)
    with pytest.raises(UserError, match=r"disk is full(.|\n)*data\.cache"):
        build(data)
    assert stores(data.cache) == []


def test_a_corpus_that_changes_while_read_is_refused(data):
    def meddle(done, total):
        (Path(data.path) / "new.txt").write_text("more")

    with pytest.raises(UserError, match="changed while they were read"):
        build(data, progress=meddle)
    assert stores(data.cache) == []


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_that_is_none_is_refused(data, share):
    with pytest.raises(UserError, match=r"data\.validation"):
        build(msgspec.structs.replace(data, validation=share))


def test_a_mixture_shares_one_tokenizer_trained_on_all(tmp_path):
    tables = []
    for number, word in enumerate(("alpha ", "omega ")):
        folder = corpus(tmp_path / word.strip(), 10, seed=number)
        for path in folder.iterdir():
            path.write_text(path.read_text() + word * 50)
        tables.append(Data(path=str(folder), tokenizer="bpe:300", validation=0.2))
    first, second = build_all(tables, tmp_path / "cache")
    assert first.tokenizer.fingerprint == second.tokenizer.fingerprint
    assert all(len(first.tokenizer.encode(text)) <= 2 for text in (b" alpha", b" omega"))
    assert len(list((tmp_path / "cache" / "tokenizers").glob("*/bpe-300.json"))) == 1
    with pytest.raises(UserError, match="different tokenizers"):
        build_all([tables[0], msgspec.structs.replace(tables[1], tokenizer="bytes")], tmp_path / "cache")
    with pytest.raises(UserError, match=r"no \[data\] table"):
        build_all([], tmp_path / "cache")


def test_a_bpe_of_one_large_document_has_text_to_learn_from(tmp_path, monkeypatch):
    monkeypatch.setattr(token_store, "SAMPLE", 1)
    (tmp_path / "one.txt").write_text("the same words again\n" * 100)
    store = build(Data(path=str(tmp_path / "one.txt"), tokenizer="bpe:300"), tmp_path / "cache")
    assert store.train.tokens < store.train.bytes / 3


# Processes. One program, without torch, forks its builders: imports are paid once.

DRIVER = """
import json, os, random, signal, sys, time
from pathlib import Path
from espalier.recipe import Data
from espalier.language import token_shards, token_store

path, cache, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
data = Data(path=path, validation=0.2)
token_shards.SHARD_TOKENS = 1000

def child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid

def build_and_tell(slow=0.0):
    calls = []
    def progress(done, total):
        calls.append(done)
        time.sleep(slow)
    store = token_store.build(data, cache, progress)
    with open(cache.parent / f"told-{os.getpid()}", "w") as file:
        json.dump([store.fingerprint, len(calls)], file)

def good():
    found = [p for p in (cache / "tokens").glob("*") if p.is_dir() and p.suffix != token_shards.BUILDING]
    for store in found:
        token_shards.check(store, token_shards.read_index(store), hashes=True)
    return len(found)

def killed_at(last):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove") and str(cache) in str(arguments[0]):
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    token_store.build(data, cache)
"""

KILLS = """
kills = 0
for moment in range(1, 500):
    _, status = os.waitpid(child(lambda: killed_at(moment)), 0)
    good()
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    kills += 1
draw = random.Random(seed)
for _ in range(15):
    data = Data(path=path, validation=0.2 + draw.random() / 100)
    pid = child(lambda: token_store.build(data, cache))
    time.sleep(draw.random() * 0.03)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    good()
token_store.build(Data(path=path, validation=0.3), cache)
left = [p.name for p in (cache / "tokens").glob("*" + token_shards.BUILDING)]
print(json.dumps([kills, good(), left]))
"""

TOGETHER = """
pids = [child(lambda: build_and_tell(0.1)) for _ in range(3)]
print(json.dumps([[os.waitpid(pid, 0)[1] for pid in pids], good()]))
"""


def drive(program, tmp_path):
    corpus(tmp_path / "corpus", 40)
    command = [sys.executable, "-c", DRIVER + program, str(tmp_path / "corpus"), str(tmp_path / "cache"), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_builder_killed_at_any_moment_leaves_nothing_or_a_good_store(tmp_path):
    kills, whole, left = drive(KILLS, tmp_path)
    assert kills > 20  # every file opened, made, renamed or removed was one moment
    assert whole >= 2
    assert left == []


def test_builders_at_once_make_one_good_store(tmp_path):
    begun = time.monotonic()
    states, whole = drive(TOGETHER, tmp_path)
    assert states == [0, 0, 0]
    assert whole == 1
    told = [json.loads(path.read_text()) for path in tmp_path.glob("told-*")]
    assert len({fingerprint for fingerprint, _ in told}) == 1
    assert sorted(calls > 0 for _, calls in told) == [False, False, True]
    assert time.monotonic() - begun < 100
