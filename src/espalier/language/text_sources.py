"""Text sources: files, folders, globs, rows (JSON lines, JSON, CSV, Parquet), the Python standard library, Hugging
Face datasets.

`listing` looks at names, sizes and times only; `documents` reads, always in the same order (names by code point).
"""

from __future__ import annotations

import glob
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from espalier.language import data_folder, row_files
from espalier.language.row_files import RESTORE, SourceFile
from espalier.recipe import Data, data_hash, data_path
from espalier.recipe.errors import UserError, missing_extra, nearest
from espalier.recipe.foreign_files import Fields, FieldUse, parsing, printable, unused
from espalier.recipe.units import plural

KNOWN = ("a file", "a folder", "a glob", "python:stdlib", "hf:NAME")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_READER = 3
"""Raised when the same files give other texts or conversations: what is cached by `Listing.key` is made anew."""
_WHOLE = ("text", "document", "binary")
"""Forms of files that are one document."""
_TEXT_KEYS = ("text", "content")
_SAMPLED = 1000
"""Rows whose other columns are looked at; those of more would take as long as the text."""

Skipped = list[tuple[str, str]]


class Document(NamedTuple):
    """One text. `data` is UTF-8 without NUL bytes and not empty; `read` counts source bytes consumed so far."""

    name: str
    data: bytes
    read: int


@dataclass(frozen=True)
class Listing:
    """What a source holds, without reading it. `skipped` are names that are not regular files, `notes` sentences on
    files that are not read, `tables` what LLaMA-Factory's `dataset_info.json` says of files by name."""

    origin: str
    entries: tuple[SourceFile, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    rows: Any = field(default=None, compare=False)
    notes: tuple[str, ...] = ()
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes on disk (rows, for a Hugging Face dataset): the unit of `Document.read`."""
        return sum(entry.size for entry in self.entries)

    @property
    def key(self) -> str:
        """Hash of names, sizes and times: a cheap sign that nothing changed on this machine."""
        files = [(entry.name, entry.size, entry.modified) for entry in self.entries]
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode((_READER, self.origin, files, dict(self.tables))))


def content_hashes(data: Data) -> dict[str, str]:
    """Hashes of the files that `data.path` means, by name; none of a source without files."""
    stdlib = data.path == "python:stdlib"
    if data.path.startswith(("hf:", "python:")) and not stdlib:
        return {}
    entries = listing(data).entries
    return data_hash.hashes(
        {f"{data.path}/{entry.name}" if stdlib else entry.path: entry.path for entry in entries if entry.path}
    )


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
    with parsing(place, RESTORE):
        if place.is_dir():
            files = _folder(place, lambda name: not name.startswith(".") and name != "__pycache__")
            listed = _filled(data, files)
            chosen = data_folder.select(place, listed.entries, data.split)
            return replace(listed, entries=chosen.entries, notes=chosen.notes, tables=chosen.tables)
        if place.exists():
            return _single(data, place)
    if glob.has_magic(path):
        return _filled(data, _glob(place))
    raise _unknown(path) if _SCHEME.match(path) else data_path.missing(path, "python:stdlib")


def documents(
    data: Data, listed: Listing | None = None, skipped: Skipped | None = None, notes: list[str] | None = None
) -> Iterator[Document]:
    """The texts of `data`, in a fixed order. What is binary, not UTF-8, empty, or a row without text is appended to
    `skipped` as (name, reason); sentences on columns and files that are not used are appended to `notes` at the end.

    Raises UserError for a file that cannot be read, a malformed JSON line (file and line number), or when no text
    is left.
    """
    listed = listed or listing(data)
    reader = _TextReader(data, listed, [] if skipped is None else skipped)
    reader.skipped.extend(listed.skipped)
    some = False
    for document in reader.hub_rows() if listed.rows is not None else reader.files():
        some = True
        yield document
    if not some:
        raise reader.nothing()
    if notes is not None:
        notes.extend(reader.notes())


def _fault(data: bytes) -> str:
    if not data:
        return "empty"
    if b"\0" in data:
        return "UTF-16, not UTF-8" if data[:2] in row_files.UTF_16 else "binary (NUL byte)"
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
    with parsing(root, RESTORE):
        entries, _ = _folder(root, lambda name: name not in _NOT_STDLIB)
    return Listing(f"stdlib {root}", tuple(entry for entry in entries if entry.name.endswith(".py")))


Found = tuple[list[SourceFile], Skipped]


def _filled(data: Data, listed: Found) -> Listing:
    entries, skipped = listed
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
    table = data_folder.tables_of(place.parent).get(place.name) if place.name != data_folder.INFO else None
    tables = {} if table is None else {place.name: table}
    notes = tuple(data_folder.unused_keys(tables))
    return Listing(_origin(data, os.path.abspath(place)), (entry,), notes=notes, tables=tables)


def _origin(data: Data, where: str) -> str:
    return msgspec.json.encode([printable(where, len(where)), data.field]).decode()


def _folder(root: Path, wanted: Callable[[str], bool]) -> Found:
    def refuse(error: OSError) -> None:
        raise error

    paths: list[str] = []
    for folder, below, names in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if wanted(name)]
        paths.extend(os.path.join(folder, name) for name in names if wanted(name))
    return _entries(paths, str(root))


def _glob(pattern: Path) -> Found:
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    paths = [path for path in glob.glob(str(pattern), recursive=True) if not os.path.isdir(path)]
    return _entries(paths, str(fixed))


def _entries(paths: list[str], root: str) -> Found:
    entries: list[SourceFile] = []
    skipped: Skipped = []
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


class _TextReader:
    """Reads the texts of one source. Collects what is left out, and the columns of rows that are not read."""

    def __init__(self, data: Data, listed: Listing, skipped: Skipped) -> None:
        self.data = data
        self.listed = listed
        self.skipped = skipped
        self.columns = FieldUse(Fields("column", frozenset({data.field})))
        self.sampled = 0
        self.in_rows = 0
        self.as_rows: list[str] = []
        self.as_text: list[str] = []
        endings = {row_files.ending_of(entry.name) for entry in listed.entries}
        self.mixed = bool(endings - set(row_files.ENDINGS) - row_files.BINARY)
        """Whether there is text besides rows: a single JSON document among it, as in source code, is text."""

    def files(self) -> Iterator[Document]:
        """The texts of all files."""
        before = 0
        known = row_files.CHAT_KEYS | {self.data.field, *_TEXT_KEYS}
        for entry in self.listed.entries:
            head = row_files.head_of(entry)
            form = row_files.form_of(entry.name, head, known)
            if form not in _WHOLE:
                self.as_rows += [entry.name] * (row_files.ending_of(entry.name) not in row_files.ENDINGS)
                read = {"lines": self._lines, "parquet": self._parquet}.get(form, self._objects)
                yield from read(entry, form, before)
            elif (document := self._whole(entry, form, head)) is not None:
                yield Document(entry.name, document, before + entry.size)
            before += entry.size

    def _whole(self, entry: SourceFile, form: row_files.Form, head: bytes) -> bytes | None:
        """The text of a file that is one document; None: it is left out."""
        if form == "binary" and b"\0" not in head:
            reason = f"a {row_files.ending_of(entry.name)} file, which is no text"
        elif form == "document" and not self.mixed:
            self.columns.count(row_files.first_keys(head))
            reason = f"JSON without rows that have {self.data.field!r}"
        else:
            data = head if form == "binary" else row_files.read_whole(entry, head)
            reason = _fault(data)
            if not reason:
                self.as_text += [entry.name] * (form == "document")
                return data
        self.skipped.append((entry.name, reason))
        return None

    def _lines(self, entry: SourceFile, form: row_files.Form, before: int) -> Iterator[Document]:
        row = msgspec.defstruct("Row", [("text", str)], rename={"text": self.data.field})
        decode = msgspec.json.Decoder(row).decode
        columns = msgspec.json.Decoder(dict[str, Any]).decode
        with row_files.opened(entry) as stream:
            position = stream.raw.tell
            for number, line in row_files.numbered_lines(stream):
                name = f"{entry.name}:{number}"
                try:
                    text = decode(line).text  # type: ignore[attr-defined]
                except Exception:  # not text, or what msgspec refuses and Python reads
                    text = self._value(row_files.line_row(entry, number, line), name)
                    if text is None:
                        continue
                else:
                    self.in_rows += 1
                    if self.in_rows <= _SAMPLED or number == 1:
                        self._sample(columns(line))
                data = text.encode()
                if data and b"\0" not in data:
                    yield Document(name, data, before + position())
                else:
                    self._leave_out(name, row_files.text_fault(text))

    def _objects(self, entry: SourceFile, form: row_files.Form, before: int) -> Iterator[Document]:
        for name, row in row_files.rows(entry, form):
            if self.data.field not in row and form in ("table", "arrow"):
                self._no_column(entry, list(row))
                return
            text = self._value(row, name)
            if text is not None:
                self._sample(row)
                yield Document(name, text.encode(), before + entry.size)

    def _parquet(self, entry: SourceFile, form: row_files.Form, before: int) -> Iterator[Document]:
        names = row_files.parquet_columns(entry)
        if self.data.field not in names:
            self._no_column(entry, names)
            return
        number = 0
        for part in row_files.parquet_texts(entry, self.data.field):
            read = before + entry.size * part.last // max(1, part.rows)
            for text in part.texts:
                number += 1
                data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
                reason = _fault(data) if isinstance(data, bytes) else row_files.text_fault(data)
                if reason:
                    self.skipped.append((f"{entry.name}:{number}", f"{self.data.field!r}: {reason}"))
                else:
                    yield Document(f"{entry.name}:{number}", data, read)
        self.columns.count(names, number)
        self.sampled += number
        self.in_rows += number

    def hub_rows(self) -> Iterator[Document]:
        """The texts of a data set of the hub."""
        name = self.data.path.removeprefix("hf:")
        for number, row in enumerate(self.listed.rows):
            text = self._value(row, f"{name}:{number}")
            if text is not None:
                yield Document(f"{name}:{number}", text.encode(), number + 1)

    def _value(self, row: Mapping[str, Any], name: str) -> str | None:
        """The text of a row; None: it has none, and is left out."""
        self.in_rows += 1
        text = row.get(self.data.field)
        reason = row_files.text_fault(text) if self.data.field in row else "is missing"
        if not reason:
            assert isinstance(text, str)
            return text
        self._leave_out(name, reason)
        self._sample(row)
        return None

    def _leave_out(self, name: str, reason: str) -> None:
        self.skipped.append((name, f"{self.data.field!r} {reason}"))

    def _no_column(self, entry: SourceFile, names: list[str]) -> None:
        self.columns.count(names)
        self.skipped.append((entry.name, f"no column {self.data.field!r}"))

    def _sample(self, row: Mapping[str, Any]) -> None:
        self.sampled += 1
        self.columns.count(name for name, value in row.items() if value is not None)

    # What is said of it

    def notes(self) -> Iterator[str]:
        """Sentences on what was not used, and on files that were not taken for what they are called."""
        yield from self.listed.notes
        if self.in_rows <= self.sampled:
            yield from self.columns.notes()
        else:
            for name, count in self.columns.unused.most_common():
                yield unused("column", name, f"in {count:,} of {self.sampled:,} rows looked at")
        if self.as_rows:
            yield f"{_names(self.as_rows)} begin with an object of known keys: read as rows, not as text"
        if self.as_text:
            yield f"{_names(self.as_text)} are JSON without rows: read as text"

    def nothing(self) -> UserError:
        """The error where no text is left."""
        columns = [name for name, _ in self.columns.unused.most_common()]
        do = "name a file or folder with UTF-8 text, or path = 'python:stdlib'"
        if columns:
            near = nearest(self.data.field, columns)
            do = f"name a column of text with data.field; there are {printable(', '.join(columns[:8]))}"
            do = f"data.field = {near!r}" if near else do
        if row_files.CHAT_KEYS & set(columns):
            do = f"a [tune] table to train on chats, or {do}"
        why = row_files.summary(self.skipped)
        return UserError(
            f"data.path = {self.data.path!r} holds no text.",
            why=f"{len(self.skipped)} skipped ({why})" if self.skipped else "it is empty",
            do=do,
        )


def _names(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:3])
    return f"{plural(len(names), 'file')} ({shown}{', …' if len(names) > 3 else ''})"


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
    others = (name for name in rows.column_names if name != data.field)
    notes = tuple(unused("column", name, plural(len(rows), "row")) for name in others)
    return Listing(_origin(data, data.path), (entry,), rows=rows.select_columns([data.field]), notes=notes)


def hub_table(data: Data) -> Any:
    """All columns of a data set of the hub. Raises UserError."""
    try:
        import datasets
    except ImportError:
        raise missing_extra("datasets", "hub", f"data.path = {data.path!r}") from None
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


# Errors


def _unknown(path: str) -> UserError:
    scheme, _, name = path.partition(":")
    near = nearest(path, ["python:stdlib"])
    if near is None and scheme != "python" and nearest(scheme, ["hf"]):
        near = f"hf:{name}"
    hint = f"did you mean {near}? " if near else ""
    return UserError(f"data.path = {path!r}: unknown kind of source.", do=f"{hint}known: {', '.join(KNOWN)}")
