"""Memory-mapped token shards with an index, built once per corpus and shared by all ranks and runs of a machine.

Each document is a boundary token and its text. Which documents are held out depends on their content alone, so no text
is ever on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from espalier.language import text_sources, token_shards
from espalier.language.token_shards import Damaged, Index, SplitIndex
from espalier.language.tokenizer import SAMPLE, Ids, Tokenizer, open_tokenizer, trained
from espalier.recipe import Data
from espalier.recipe.cache_dir import cache_folder, sync_folder, writing
from espalier.recipe.errors import UserError
from espalier.recipe.units import show_size

Progress = Callable[[int, int], None]
"""Called with (source bytes done, source bytes in all), ten times a second at most, and once at the end."""

CHECKED_AT_OPEN = 256 << 20
"""Stores up to this many bytes are hashed at every opening (under 0.1 s); larger ones by `verify`."""

_BATCH = 1 << 20  # bytes of documents encoded together
_SKIPPED_KEPT = 1000
_HASHES = 1 << 64


class TokenSplit:
    """One side of a store, read through memory maps.

    `tokens` and `documents` count, `bytes` is the size of the documents' text; `fingerprint` hashes the tokens.
    """

    def __init__(self, folder: Path, index: SplitIndex, dtype: str, shard_tokens: int) -> None:
        self.tokens = index.tokens
        self.documents = index.documents
        self.bytes = index.bytes
        self.fingerprint = xxhash.xxh3_128_hexdigest(msgspec.json.encode([shard.hash for shard in index.shards]))
        self._shards = [_map(folder / shard.name, dtype) for shard in index.shards]
        self._shard_tokens = shard_tokens
        self._starts = _map(folder / index.starts.name, "<i8")
        self._names = _map(folder / index.names.name, "|u1")
        self._ends = _map(folder / index.ends.name, "<i8")

    def read(self, start: int, count: int) -> Ids:
        """Tokens `[start, start + count)`; a read-only view of the file unless they lie in two shards."""
        assert 0 <= start <= start + count <= self.tokens, f"tokens {start}+{count} of {self.tokens}"
        first, offset = divmod(start, self._shard_tokens)
        if offset + count <= self._shard_tokens:
            return self._shards[first][offset : offset + count] if count else self._shards[0][:0]
        last = (start + count - 1) // self._shard_tokens
        parts = self._shards[first : last + 1]
        end = start + count - last * self._shard_tokens
        return np.concatenate([parts[0][offset:], *parts[1:-1], parts[-1][:end]])

    def longer_documents(self, tokens: int) -> tuple[int, int]:
        """How many documents have more than `tokens` tokens, boundaries counted, and the tokens of the longest."""
        lengths = np.diff(self._starts, append=self.tokens)
        return int((lengths > tokens).sum()), int(lengths.max(initial=0))

    def documents_in(self, start: int, stop: int) -> list[str]:
        """Names of the documents that tokens `[start, stop)` belong to, in order."""
        assert 0 <= start < stop <= self.tokens, f"tokens {start} to {stop} of {self.tokens}"
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        after = int(np.searchsorted(self._starts, stop, side="left"))
        return [self._name(number) for number in range(first, after)]

    def _name(self, number: int) -> str:
        start = int(self._ends[number - 1]) if number else 0
        return self._names[start : int(self._ends[number])].tobytes().decode()


@dataclass(frozen=True)
class TokenStore:
    """The tokens of one `[data]` table: `train` and `validation`.

    `fingerprint` is equal on all machines that hold the same text in the same order. `skipped` lists (name, reason) of
    the first thousand of `skipped_documents` texts left out; `notes` are sentences the user should see.
    """

    path: Path
    origin: str
    tokenizer: Tokenizer
    train: TokenSplit
    validation: TokenSplit
    fingerprint: str
    skipped: tuple[tuple[str, str], ...]
    skipped_documents: int
    notes: tuple[str, ...]


def build(
    data: Data, cache: Path | None = None, progress: Progress | None = None, tokenizer: Tokenizer | None = None
) -> TokenStore:
    """The store of `data`: opened where it was built before, else built once, whoever comes first.

    `data.cache` goes before `cache`; `tokenizer` replaces `data.tokenizer` (a mixture shares one). Raises UserError for
    bad data, a corpus too small to be split, a full disk or an unwritable cache.
    """
    if not 0 < data.validation < 1:
        raise UserError(
            f"data.validation = {data.validation}: it is the share of the text held out, between 0 and 1.",
            do="data.validation = 0.01",
        )
    listed = text_sources.listing(data)
    root = _root(data, cache)
    tokenizer = tokenizer or _tokenizer([data], [listed], root)
    facts = [token_shards.VERSION, token_shards.SHARD_TOKENS, listed.key, tokenizer.fingerprint, data.validation]
    final = root / "tokens" / xxhash.xxh3_128_hexdigest(msgspec.json.encode(facts))
    try:
        return _open(final, data.path, tokenizer)
    except Damaged:
        pass  # looked at again under the lock: somebody may be repairing it
    with token_shards.locked(final) as alive:
        token_shards.sweep(final.parent)
        damage = ""
        try:
            return _open(final, data.path, tokenizer)
        except Damaged as error:
            damage = str(error)
        note = (f"The token shards were damaged ({damage}) and were built again.",) if final.exists() else ()
        with token_shards.placed(final) as folder:
            _write(_TokenizeJob(data, listed, tokenizer, note, _paced(progress, alive)), folder)
        return _open(final, data.path, tokenizer, hashes=False)  # as they were written


def build_all(
    data: Sequence[Data],
    cache: Path | None = None,
    progress: Progress | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[TokenStore, ...]:
    """The stores of a mixture, all with one tokenizer: `tokenizer`, else the one they name (a BPE is trained on all
    sources together).

    Raises UserError when the tables name different tokenizers, and what `build` raises.
    """
    if not data:
        raise UserError("The recipe has no [data] table.", do='[data]\npath = "python:stdlib"')
    specs = sorted({table.tokenizer for table in data})
    if len(specs) > 1:
        raise UserError(
            f"The [[data]] tables name different tokenizers: {', '.join(specs)}.",
            why="one model reads all of them, so token ids must have the same meaning",
            do=f"tokenizer = {data[0].tokenizer!r} in each",
        )
    tokenizer = tokenizer or _tokenizer(data, [text_sources.listing(table) for table in data], _root(data[0], cache))
    return tuple(build(table, cache, progress, tokenizer) for table in data)


# Opening


def _open(folder: Path, origin: str, tokenizer: Tokenizer, hashes: bool = True) -> TokenStore:
    index = token_shards.read_index(folder)
    if index.tokenizer != tokenizer.fingerprint:
        raise Damaged(f"{token_shards.INDEX} is of another tokenizer")
    size = sum(file.bytes for split in (index.train, index.validation) for file in split.files)
    try:
        token_shards.check(folder, index, hashes=hashes and size <= CHECKED_AT_OPEN)
        train, validation = (
            TokenSplit(folder, split, index.dtype, index.shard_tokens) for split in (index.train, index.validation)
        )
    except (OSError, ValueError) as error:  # swapped by another process between two looks
        raise Damaged(str(error)) from None
    facts = (index.fingerprint, index.skipped, index.skipped_documents, index.notes)
    return TokenStore(folder, origin, tokenizer, train, validation, *facts)


def _map(path: Path, dtype: str) -> NDArray[Any]:
    # A plain array over the map: slicing np.memmap itself costs several microseconds a time.
    return np.asarray(np.memmap(path, np.dtype(dtype), mode="r"))


# Building


@dataclass(frozen=True)
class _TokenizeJob:
    data: Data
    listed: text_sources.Listing
    tokenizer: Tokenizer
    notes: tuple[str, ...]
    progress: Progress


Sided = Iterator[tuple[bool, text_sources.Document]]


def _write(job: _TokenizeJob, folder: Path) -> None:
    """Writes both splits and the index into `folder`."""
    threshold, note = _threshold(job)
    skipped: text_sources.Skipped = []
    unused: list[str] = []
    documents = text_sources.documents(job.data, job.listed, skipped, unused)
    sided = (
        _cut(next(documents), job.data.validation)
        if threshold is None
        else ((xxhash.xxh3_64_intdigest(document.data) < threshold, document) for document in documents)
    )
    writers = [
        token_shards.SplitWriter(folder, name, job.tokenizer, token_shards.SHARD_TOKENS)
        for name in ("train", "validation")
    ]
    try:
        for batch in _batches(sided):
            encoded = job.tokenizer.encode_many([document.data for _, document in batch])
            for (held_out, document), ids in zip(batch, encoded, strict=True):
                writers[held_out].add(document.name, ids, len(document.data))
            job.progress(batch[-1][1].read, job.listed.bytes)
        train, validation = (writer.finish() for writer in writers)
    finally:
        for writer in writers:
            writer.close()
    more = any(True for _ in documents)  # a cut document leaves the iterator before its last skipped names
    if more or text_sources.listing(job.data).key != job.listed.key:
        raise UserError(
            f"The files of data.path = {job.data.path!r} changed while they were read.",
            do="start again when nothing writes to them, or copy them elsewhere first",
        )
    index = Index(
        version=token_shards.VERSION,
        tokenizer=job.tokenizer.fingerprint,
        dtype=job.tokenizer.dtype.newbyteorder("<").str,
        shard_tokens=token_shards.SHARD_TOKENS,
        train=train,
        validation=validation,
        fingerprint=token_shards.fingerprint(job.tokenizer, train, validation),
        skipped=tuple(skipped[:_SKIPPED_KEPT]),
        skipped_documents=len(skipped),
        notes=(*job.notes, *note, *unused),
    )
    file = folder / token_shards.INDEX
    file.write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1))
    sync_folder(file)
    job.progress(job.listed.bytes, job.listed.bytes)


def _batches(sided: Sided) -> Iterator[list[tuple[bool, text_sources.Document]]]:
    batch: list[tuple[bool, text_sources.Document]] = []
    size = 0
    for held_out, document in sided:
        batch.append((held_out, document))
        size += len(document.data)
        if size >= _BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _threshold(job: _TokenizeJob) -> tuple[int | None, tuple[str, ...]]:
    """The content hash below which a document is held out, or None for a single document, and what to say of it.

    Reads only until both sides are known to have a document.
    """
    threshold = round(job.data.validation * _HASHES)
    low, high, count, size = _HASHES, -1, 0, 0
    for document in text_sources.documents(job.data, job.listed):
        value = xxhash.xxh3_64_intdigest(document.data)
        low, high, count, size = min(low, value), max(high, value), count + 1, size + len(document.data)
        if low < threshold <= high:
            return threshold, ()
    if count == 1:
        return None, (f"{job.data.path} is a single document: its end is held out, from a line end on.",)
    if low == high:
        raise UserError(
            f"The corpus is too small: {job.data.path} holds {count} documents ({show_size(size)}) that are all equal.",
            why="nothing else is left to be held out for validation",
            do="add another document to data.path",
        )
    side, threshold = ("training", high) if high < threshold else ("validation", low + 1)
    share = f"data.validation = {job.data.validation}"
    return threshold, (f"{share} left no document of {count} ({show_size(size)}) for {side}; one was moved there.",)


def _cut(document: text_sources.Document, validation: float) -> Sided:
    """One document as two, cut at the line end next before the share held out, else after it, else anywhere."""
    text = document.data
    aim = min(max(round(len(text) * (1 - validation)), 1), len(text) - 1)
    place = text.rfind(b"\n", 0, aim) + 1 or text.find(b"\n", aim, len(text) - 1) + 1 or aim
    places = (at for at in chain(range(place, 0, -1), range(place, len(text))) if text[at] & 0xC0 != 0x80)
    if not (place := next(places, 0)):
        raise UserError(
            f"The corpus is too small: {document.name} has {show_size(len(text))}.",
            why="it is the only document, and it cannot be cut in two",
            do="add text to data.path",
        )
    yield False, document._replace(data=text[:place])
    yield True, document._replace(data=text[place:])


def _paced(progress: Progress | None, alive: Callable[[], None]) -> Progress:
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 0.1 or done >= total:
            last = now
            alive()
            if progress:
                progress(done, total)

    return report


# Tokenizers


def _root(data: Data, cache: Path | None) -> Path:
    return Path(data.cache).expanduser() if data.cache else cache or cache_folder()


def _tokenizer(data: Sequence[Data], listed: Sequence[text_sources.Listing], root: Path) -> Tokenizer:
    spec = data[0].tokenizer
    if not spec.startswith("bpe:"):
        return open_tokenizer(spec)
    facts = [[listing.key, table.validation] for listing, table in zip(listed, data, strict=True)]
    folder = root / "tokenizers" / xxhash.xxh3_128_hexdigest(msgspec.json.encode(facts))

    def corpus() -> Iterator[str]:
        for table, listing in zip(data, listed, strict=True):
            yield from _sample(table, listing, SAMPLE // len(data))

    if trained(spec, folder).is_file():
        return open_tokenizer(spec, corpus, folder)
    with token_shards.locked(folder), writing(folder, token_shards.CACHE):
        return open_tokenizer(spec, corpus, folder)


def _sample(data: Data, listed: text_sources.Listing, size: int) -> Iterator[str]:
    """About `size` bytes of the documents that are trained on, spread evenly over them by hash; if those are none (a
    corpus of few large documents), the documents in order."""
    threshold = round(data.validation * _HASHES)
    taken = min(1.0, size / max(1, listed.bytes)) * (_HASHES - threshold)
    any_text = False
    for document in text_sources.documents(data, listed):
        if 0 <= xxhash.xxh3_64_intdigest(document.data) - threshold <= taken:
            any_text = True
            yield document.data.decode()
    if not any_text:
        for document in text_sources.documents(data, listed):
            yield document.data.decode()
