"""Text sources: files, folders, globs, JSON lines, the Python standard library, Hugging Face datasets.

`listing` looks at names, sizes and times only; `documents` reads, always in the same order (names by code point).
"""

from __future__ import annotations

import difflib
import errno
import glob
import gzip
import io
import os
import re
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
import zstandard

from espalier.config import Data, data_path
from espalier.errors import UserError, missing_extra, nearest

KNOWN = ("a file", "a folder", "a glob", "python:stdlib", "hf:NAME")
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_CHUNK = 1 << 20  # compressed bytes handed to zstandard at once

Skipped = list[tuple[str, str]]


class Document(NamedTuple):
    """One text. `data` is UTF-8 without NUL bytes and not empty; `read` counts source bytes consumed so far."""

    name: str
    data: bytes
    read: int


class SourceFile(NamedTuple):
    """One file as the file system shows it: `size` in bytes, `modified` in nanoseconds."""

    name: str
    path: str
    size: int
    modified: int


@dataclass(frozen=True)
class Listing:
    """What a source holds, without reading it. `skipped` are names that are not regular files."""

    origin: str
    entries: tuple[SourceFile, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    rows: Any = field(default=None, compare=False)

    @property
    def bytes(self) -> int:
        """Bytes on disk (rows, for a Hugging Face dataset): the unit of `Document.read`."""
        return sum(entry.size for entry in self.entries)

    @property
    def key(self) -> str:
        """Hash of names, sizes and times: a cheap sign that nothing changed on this machine."""
        table = (self.origin, [(entry.name, entry.size, entry.modified) for entry in self.entries])
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(table))


def listing(data: Data) -> Listing:
    """Names, sizes and times of everything `data.path` means.

    Raises UserError for a path that is missing, empty or not readable, and for an unknown scheme.
    """
    path = data.path
    if not path.strip():
        raise UserError("data.path is empty.", do="data.path = a file or folder of text, or python:stdlib")
    if path == "python:stdlib":
        return _stdlib()
    if path.startswith("hf:"):
        return _hub(data)
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            return _filled(data, _folder(place, lambda name: not name.startswith(".") and name != "__pycache__"))
        if place.exists():
            return _single(data, place)
    except OSError as error:
        raise _unreadable(str(place), error) from None
    if glob.has_magic(path):
        return _filled(data, _glob(place))
    raise _unknown(path) if _SCHEME.match(path) else data_path.missing(path, "python:stdlib")


def documents(data: Data, listed: Listing | None = None, skipped: Skipped | None = None) -> Iterator[Document]:
    """The texts of `data`, in a fixed order. What is binary, not UTF-8 or empty is appended to `skipped` as
    (name, reason).

    Raises UserError for a file that cannot be read, a malformed JSON line (file and line number), or when no text
    is left.
    """
    listed = listed or listing(data)
    skipped = [] if skipped is None else skipped
    skipped.extend(listed.skipped)
    found = False
    for document in _rows(data, listed) if listed.rows is not None else _files(data, listed):
        reason = _fault(document.data)
        if reason:
            skipped.append((document.name, reason))
        else:
            found = True
            yield document
    if not found:
        first = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3])
        raise UserError(
            f"data.path = {data.path!r} holds no text.",
            why=f"{len(skipped)} skipped ({first})" if skipped else "it is empty",
            do="name a file or folder with UTF-8 text, or path = 'python:stdlib'",
        )


def _fault(data: bytes) -> str:
    if not data:
        return "empty"
    if b"\0" in data:
        return "binary (NUL byte)"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start})"
    return ""


# Listings


def _stdlib() -> Listing:
    root = Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise UserError(
            f"data.path = 'python:stdlib': this Python has no standard library folder ({root}).",
            do="data.path = a file or folder of text",
        )
    try:
        found, _ = _folder(root, lambda name: name not in _NOT_STDLIB)
    except OSError as error:
        raise _unreadable(str(root), error) from None
    return Listing(f"stdlib {root}", tuple(entry for entry in found if entry.name.endswith(".py")))


Found = tuple[list[SourceFile], list[tuple[str, str]]]


def _filled(data: Data, found: Found) -> Listing:
    entries, skipped = found
    if not entries:
        raise UserError(
            f"data.path = {data.path!r} holds no files.",
            why="hidden files and __pycache__ are left out",
            do="check the folder, or use path = 'python:stdlib'",
        )
    return Listing(_origin(data, os.path.abspath(data.path)), tuple(entries), tuple(skipped))


def _single(data: Data, place: Path) -> Listing:
    status = place.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"data.path = {data.path!r} is neither a file nor a folder.", do=f"one of: {', '.join(KNOWN)}")
    entry = SourceFile(place.name, str(place), status.st_size, status.st_mtime_ns)
    return Listing(_origin(data, os.path.abspath(place)), (entry,))


def _origin(data: Data, where: str) -> str:
    return msgspec.json.encode([where, data.field]).decode()


def _folder(root: Path, wanted: Callable[[str], bool]) -> Found:
    def refuse(error: OSError) -> None:
        raise error

    paths: list[str] = []
    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if wanted(name)]
        paths.extend(os.path.join(folder, name) for name in names if wanted(name))
    return _entries(paths, str(root))


def _glob(pattern: Path) -> Found:
    fixed = Path(*_before_magic(pattern.parts))
    paths = [path for path in glob.glob(str(pattern), recursive=True) if not os.path.isdir(path)]
    return _entries(paths, str(fixed))


def _before_magic(parts: tuple[str, ...]) -> Iterator[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def _entries(paths: list[str], root: str) -> Found:
    entries: list[SourceFile] = []
    skipped: list[tuple[str, str]] = []
    for path in set(paths):
        name = os.fsencode(Path(os.path.relpath(path, root)).as_posix()).decode("utf-8", "replace")
        try:
            status = os.stat(path)
        except FileNotFoundError:
            skipped.append((name, "a link to nothing"))
            continue
        if stat.S_ISREG(status.st_mode):
            entries.append(SourceFile(name, path, status.st_size, status.st_mtime_ns))
        else:
            skipped.append((name, "not a regular file"))
    return sorted(entries), sorted(skipped)


# Reading


def _files(data: Data, listed: Listing) -> Iterator[Document]:
    before = 0
    for entry in listed.entries:
        try:
            if entry.name.endswith(JSON_LINES):
                yield from _json_lines(entry, data.field, before)
            else:
                with open(entry.path, "rb") as file:
                    yield Document(entry.name, file.read(), before + entry.size)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise _unreadable(entry.path, error) from None
        before += entry.size


def numbered_lines(entry: SourceFile) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1, of a file that may be compressed. Raises UserError."""
    try:
        with open(entry.path, "rb") as raw:
            yield from ((number, line) for number, line in enumerate(_lines(raw, entry.name), start=1) if line.strip())
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise _unreadable(entry.path, error) from None


def _json_lines(entry: SourceFile, key: str, before: int) -> Iterator[Document]:
    row = msgspec.defstruct("Row", [("text", str)], rename={"text": key})
    decoder = msgspec.json.Decoder(row)
    with open(entry.path, "rb") as raw:
        for number, line in enumerate(_lines(raw, entry.name), start=1):
            if not line.strip():
                continue
            try:
                text: str = decoder.decode(line).text  # type: ignore[attr-defined]
            except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
                raise UserError(
                    f"{entry.path}, line {number} is not a JSON object with text in {key!r}: {error}.",
                    do="repair or remove the line, or name another field with data.field",
                ) from None
            yield Document(f"{entry.name}:{number}", text.encode("utf-8", "surrogatepass"), before + raw.tell())


def _lines(raw: io.BufferedReader, name: str) -> Iterator[bytes]:
    if name.endswith(".gz"):
        with gzip.GzipFile(fileobj=raw) as file:
            yield from file
    elif name.endswith(".zst"):
        yield from _zstd_lines(raw)
    else:
        yield from raw


def _zstd_lines(raw: io.BufferedReader) -> Iterator[bytes]:
    rest = b""
    for piece in _zstd_pieces(raw):
        first, *others = piece.split(b"\n")
        if not others:
            rest += first
            continue
        yield rest + first
        yield from others[:-1]
        rest = others[-1]
    if rest:
        yield rest


def _zstd_pieces(raw: io.BufferedReader) -> Iterator[bytes]:
    # stream_reader takes a file cut short for its end, so the frames are followed by hand.
    frame: Any = None
    while chunk := raw.read(_CHUNK):
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("compressed file ends before its end mark")


# Hugging Face


def _hub(data: Data) -> Listing:
    rows = hub_table(data)
    if data.field not in rows.column_names:
        near = nearest(data.field, rows.column_names)
        raise UserError(
            f"data.field = {data.field!r}: {data.path!r} has no such column.",
            why=f"it has {', '.join(rows.column_names)}",
            do=f"data.field = {near or rows.column_names[0]!r}",
        )
    entry = SourceFile(f"{data.path}@{data.split} {rows._fingerprint}", "", len(rows), 0)
    return Listing(_origin(data, data.path), (entry,), rows=rows.select_columns([data.field]))


def hub_table(data: Data) -> Any:
    """All columns of a data set of the hub. Raises UserError."""
    try:
        import datasets
    except ImportError:
        raise missing_extra("datasets", "hub", f"data.path = {data.path!r}") from None
    return _load(datasets, data)


def _load(datasets: Any, data: Data) -> Any:
    parts = data.path.removeprefix("hf:").split("/")
    # On the hub NAME is usually OWNER/NAME; two parts may also be an old plain name and its configuration.
    tries = [["/".join(parts[:2]), *parts[2:]]] if len(parts) <= 3 else []
    if len(parts) == 2:
        tries.append(parts)
    last: Exception | None = None
    for names in tries:
        try:
            return datasets.load_dataset(*names, split=data.split)
        except Exception as error:  # the library's errors have no common base
            last = last or error
    raise UserError(
        f"data.path = {data.path!r} (split {data.split!r}) cannot be loaded.",
        why=f"{type(last).__name__}: {last}" if last else "the name has more than three parts",
        do="write hf:NAME, hf:OWNER/NAME or hf:OWNER/NAME/CONFIG, and a split the data set has",
    )


def _rows(data: Data, listed: Listing) -> Iterator[Document]:
    name = data.path.removeprefix("hf:")
    for number, row in enumerate(listed.rows):
        text = row[data.field]
        if not isinstance(text, str):
            raise UserError(
                f"{data.path}, row {number}: {data.field!r} is {type(text).__name__}, not text.",
                do="name a column of strings with data.field",
            )
        yield Document(f"{name}:{number}", text.encode("utf-8", "surrogatepass"), number + 1)


# Errors


def _unreadable(path: str, error: Exception) -> UserError:
    denied = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM)
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return UserError(
        f"Cannot read {path}.",
        why=reason,
        do=f"chmod u+r {path}" if denied else "restore the file, or take it out of data.path",
    )


_ALIKE = 0.75  # of difflib's 1: one slip in a word of four letters or more, two in longer ones


def _similar(word: str, known: list[str]) -> str | None:
    """The known word that `word` is probably a slip of. A wrong suggestion would mislead, so it has to be close."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE)), None)


def _unknown(path: str) -> UserError:
    scheme, _, name = path.partition(":")
    near = _similar(path, ["python:stdlib"])
    if near is None and scheme != "python" and _similar(scheme, ["hf"]):
        near = f"hf:{name}"
    hint = f"did you mean {near}? " if near else ""
    return UserError(f"data.path = {path!r}: unknown kind of source.", do=f"{hint}known: {', '.join(KNOWN)}")
