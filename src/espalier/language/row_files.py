"""Row files: JSON lines, JSON, CSV and Parquet, plain or compressed, as rows of named values.

The content of a file decides its form; its ending helps where the content leaves it open. A byte order mark is skipped.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import zstandard

from espalier.machine.resource_limits import refuse_large
from espalier.recipe.errors import UserError, missing_extra
from espalier.recipe.foreign_files import BYTE_ORDER_MARK, decoded, parsing, printable
from espalier.recipe.units import plural

Form = Literal["lines", "json", "table", "parquet", "arrow", "text", "document", "binary"]
"""`json`: a list of objects, or an object that holds one. `document`: JSON without rows."""

HEAD = 1 << 16
"""Bytes of a file from which its form is seen; of JSON up to `_LONG_HEAD`."""
_LONG_HEAD = 1 << 22
_CHUNK = 1 << 20  # bytes read from a compressed file at once
_LARGE = 1 << 28  # bytes of a file above which its size is compared with memory
_JSON_MEMORY = 8
"""Bytes of memory for a byte of a JSON list: measured 4 to 7 with short rows."""

LINES = (".jsonl", ".ndjson", ".jsonlines")
TABLES = (".csv", ".tsv")
ENDINGS = (*LINES, *TABLES, ".json", ".parquet", ".arrow", ".feather")
"""Endings of files of rows, in any case, before `.gz` and `.zst`."""
COMPRESSED = (".gz", ".zst")
_NOT_TEXT = (
    ".7z .avi .avro .bin .bmp .bz2 .ckpt .db .dll .doc .docx .dylib .exe .gguf .gif .h5 .hdf5 .ico .jar"
    " .joblib .jpeg .jpg .mkv .mov .mp3 .mp4 .msgpack .npy .npz .ods .odt .ogg .onnx .orc .parq .pdf .pickle .pkl .png"
    " .ppt .pptx .pt .pth .pyc .rar .safetensors .so .sqlite .tar .tfrecord .tgz .tif .tiff .wav .webm .webp .whl .woff"
    " .xls .xlsx .xz .zip"
)
BINARY = frozenset(_NOT_TEXT.split())
"""Endings whose files are not text, even where their bytes are."""
CONTAINERS = ("data", "rows", "examples", "train", "instances", "items")
"""Keys of a JSON object under which a list of rows stands."""
CHAT_KEYS = frozenset({"messages", "conversations", "prompt", "instruction", "chosen"})
"""Keys of rows of chats."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""Byte order marks of files that are not read."""
_ARROW = b"ARROW1"
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of compressed files."""
RESTORE = "restore the file, or take it out of data.path"
_EXCEL = re.compile(r'"?sep=(.)"?\s*')
"""A first line that tells Excel the separator."""
_LIST_OF_OBJECTS = re.compile(rb"\[\s*\{")
_BEGINS_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*[\[{]")


class SourceFile(NamedTuple):
    """One file as the file system shows it: `size` in bytes, `modified` in nanoseconds."""

    name: str
    path: str
    size: int
    modified: int


class RowStream(NamedTuple):
    """An open file: what it holds, decompressed, and the file itself, whose position is the progress."""

    content: io.BufferedReader
    raw: io.BufferedReader


def ending_of(name: str) -> str:
    """The ending of a file's name in small letters, without that of its compression: `.json` of `A.JSON.gz`."""
    stem = name[name.rfind("/") + 1 :].lower()
    if stem.endswith(COMPRESSED):
        stem = stem[: stem.rfind(".")]
    dot = stem.rfind(".")
    return stem[dot:] if dot > 0 else ""


@contextmanager
def opened(entry: SourceFile) -> Iterator[RowStream]:
    """The file, decompressed as its first bytes say. Raises UserError, also while it is read."""
    with parsing(entry.path, RESTORE), open(entry.path, "rb") as raw:
        content = _decompressed(raw)
        if (start := content.peek(2)[:2]) in UTF_16:
            decoded(start, entry.path)  # says which encoding it is
        yield RowStream(content, raw)


def _decompressed(raw: io.BufferedReader) -> io.BufferedReader:
    start = raw.peek(4)
    if start.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK)
    return io.BufferedReader(_ZstdFile(raw), _CHUNK) if start.startswith(_ZSTD) else raw


class _ZstdFile(io.RawIOBase):
    """Frames of zstandard, one after the other. Holds what is decompressed and not read yet."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._pieces = _zstd_pieces(raw)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


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


def head_of(entry: SourceFile) -> bytes:
    """The first bytes without a byte order mark, for `form_of`; more where they begin JSON. Raises UserError."""
    with parsing(entry.path, RESTORE), open(entry.path, "rb", 0) as raw:
        head = _head(raw, min(HEAD, entry.size + 1) if entry.size else HEAD)
    if not head.startswith((_GZIP, _ZSTD)):
        return head
    with opened(entry) as stream:
        return _head(stream.content)


def _head(file: io.BufferedReader | io.FileIO, size: int = HEAD) -> bytes:
    head = file.read(size) or b""
    if len(head) == HEAD and _BEGINS_JSON.match(head):
        first, _, rest = head.removeprefix(BYTE_ORDER_MARK).partition(b"\n")
        # Where the first line is a whole object and another one begins, more need not be read to see the form.
        if rest.lstrip()[:1] != b"{" or _first_object(first)[0] is None:
            head += file.read(_LONG_HEAD) or b""
    return head.removeprefix(BYTE_ORDER_MARK)


def look(entry: SourceFile, known: frozenset[str]) -> Form:
    """The form of a file. Raises UserError where it cannot be read."""
    return form_of(entry.name, head_of(entry), known)


def form_of(name: str, head: bytes, known: frozenset[str]) -> Form:
    """The form of a file that begins with `head`. `known`: keys of which one makes an object a row."""
    ending = ending_of(name)
    if ending == ".parquet" or head[:4] == b"PAR1":
        return "parquet"
    if ending == ".arrow" or head.startswith(_ARROW):
        return "arrow"
    if ending in TABLES and not head.lstrip().startswith((b'{"', b'[{"')):
        return "table"
    if ending in BINARY:
        return "binary"
    plain: Form = "lines" if ending in LINES else "document" if ending == ".json" else "text"
    return _json_form(head, ending, known) or plain


def _json_form(head: bytes, ending: str, known: frozenset[str]) -> Form | None:
    """The form of what begins with an object or a list of objects; None: it is told by the ending."""
    if not _BEGINS_JSON.match(head):
        return None
    start = head.lstrip()
    listed = _LIST_OF_OBJECTS.match(start)
    if not listed and start[:1] != b"{":
        return None
    row, rest = _first_object(start)
    if row is None:  # too long, or broken: the reader of its ending says what is wrong
        if ending == ".json" or (listed and ending in LINES):
            return "json"
        key = re.match(rb'\{\s*"([^"\\]*)"\s*:', start)
        return "lines" if key and key[1].decode("utf-8", "replace") in known else None
    if listed:
        return "json" if known & row.keys() or ending in LINES else None
    if rest.lstrip()[:1] == "{":
        return "lines"
    if rest.strip():
        return None
    if ending in LINES:
        return "lines" if len(start.splitlines()) == 1 else "json"
    return "json" if known & row.keys() or contained(row) is not None else None


def _first_object(text: bytes) -> tuple[dict[str, Any] | None, str]:
    """The object that `text`, or a list there, begins with, and what follows it."""
    listed = _LIST_OF_OBJECTS.match(text.lstrip())
    shown = text.lstrip()[listed.end() - 1 if listed else 0 :].decode("utf-8", "replace")
    try:
        row, end = json.JSONDecoder().raw_decode(shown)
    except (ValueError, RecursionError):
        return None, ""
    return row, shown[end:]


def first_keys(head: bytes) -> list[str]:
    """Keys of the object, or of the first object of the list, that a file begins with."""
    row, _ = _first_object(head)
    return list(row) if isinstance(row, dict) else []


def contained(row: Mapping[str, Any]) -> list[Any] | None:
    """The list of rows that a JSON object holds under one of the `CONTAINERS`; None: there is none."""
    return next((row[key] for key in CONTAINERS if _is_rows(row.get(key))), None)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(part, dict) for part in value)


# --- rows --------------------------------------------------------------------------------------------------------


Row = Mapping[str, Any]
NamedRows = Iterator[tuple[str, Row]]
"""Each row with its file and number."""


def rows(entry: SourceFile, form: Form) -> NamedRows:
    """(name, row) of each row, `file:number` from 1 (lines by their line). Raises UserError for what is malformed."""
    if form == "lines":
        return _line_rows(entry)
    read = {"json": json_rows, "table": table_rows, "arrow": arrow_rows, "parquet": parquet_rows}[form]
    return ((f"{entry.name}:{number}", row) for number, row in enumerate(read(entry), start=1))


def numbered_lines(stream: RowStream) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1."""
    first = stream.content.readline().removeprefix(BYTE_ORDER_MARK)
    if first and not first.isspace():
        yield 1, first
    yield from ((number, line) for number, line in enumerate(stream.content, start=2) if not line.isspace())


def _line_rows(entry: SourceFile) -> NamedRows:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with opened(entry) as stream:
        for number, line in numbered_lines(stream):
            try:
                row = decode(line)
            except Exception:  # msgspec is stricter than JSON as it is written: half surrogate pairs, NaN
                row = line_row(entry, number, line)
            yield f"{entry.name}:{number}", row


def line_row(entry: SourceFile, number: int, line: bytes) -> dict[str, Any]:
    """The object of a line, as Python reads it; bytes that are not UTF-8 become half surrogate pairs.

    Raises UserError that names file and line for what is no object.
    """
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        reason = f": {printable(error)}"
    else:
        if isinstance(row, dict):
            return row
        reason = f", but {type(row).__name__}"
    raise UserError(
        f"{printable(entry.path)}, line {number} is not a JSON object{reason}.",
        do="repair or remove the line",
    )


def json_rows(entry: SourceFile) -> list[Row]:
    """The rows of a JSON list of objects, of an object that holds one, or an object itself. Raises UserError."""
    do = "a JSON list of objects"
    text = decoded(read_whole(entry, head_of(entry), _JSON_MEMORY), entry.path)
    with parsing(entry.path, do):
        value = json.loads(text)
    if isinstance(value, dict):
        lists = [key for key, part in value.items() if _is_rows(part)]
        inside = contained(value)
        if inside is None and CHAT_KEYS & value.keys():
            return [value]
        if len(lists) > 1:
            raise UserError(
                f"{printable(entry.path)} holds several lists of rows: {_few(lists)}.", do="a file for each of them"
            )
        value = inside or [value]
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise UserError(f"{printable(entry.path)} is no JSON list of objects.", do="one object for each row")
    return value


def read_whole(entry: SourceFile, head: bytes, factor: int = 2) -> bytes:
    """All of a file that begins with `head`. Raises UserError where `factor` times as much does not fit into memory."""
    if len(head) < HEAD - len(BYTE_ORDER_MARK):
        return head
    with parsing(entry.path, RESTORE), open(entry.path, "rb") as raw:
        content = _decompressed(raw)
        if content is raw:
            _check_size(entry, entry.size, factor)
            whole = Path(entry.path).read_bytes()  # opened anew: what is buffered would be joined to the rest, a copy
            return whole.removeprefix(BYTE_ORDER_MARK)
        pieces: list[bytes] = []
        while piece := content.read(_CHUNK * 64):
            pieces.append(piece)
            _check_size(entry, sum(map(len, pieces)), factor)
        return b"".join(pieces).removeprefix(BYTE_ORDER_MARK)


def _check_size(entry: SourceFile, size: int, factor: int) -> None:
    if size > _LARGE:
        do = "write it as JSON lines, or as Parquet with small row groups, which are read in pieces"
        refuse_large(printable(entry.path), size * factor, do)


def table_rows(entry: SourceFile) -> Iterator[Row]:
    """Rows of a CSV or TSV file by the names of its first row; cells are text, and `None` where a row is too short.

    Raises UserError for a row with more cells than there are names, and for two columns of one name.
    """
    csv.field_size_limit(sys.maxsize)
    do = "repair the row, or write it as JSON lines"
    with opened(entry) as stream, parsing(entry.path, do):
        text = io.TextIOWrapper(stream.content, "utf-8-sig", errors="surrogateescape", newline="")
        first = text.readline()
        stated = _EXCEL.fullmatch(first)
        first = text.readline() if stated else first
        marks = stated[1] if stated else "\t" if ending_of(entry.name) == ".tsv" else ",\t;|"
        delimiter = max(marks, key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
        lines = csv.reader(chain([first], text), delimiter=delimiter, strict=True)
        names = [name.strip() for name in next(lines, [])]
        if twice := [name for number, name in enumerate(names) if name and name in names[:number]]:
            what = f"{printable(entry.path)} has two columns called {printable(twice[0])!r}."
            raise UserError(what, do="rename or remove one")
        for cells in filter(None, lines):
            if len(cells) > len(names):
                raise UserError(
                    f"{printable(entry.path)}, line {lines.line_num + bool(stated)} has {len(cells)} cells.",
                    why=f"its first row names {plural(len(names), 'column')}: {_few(names)}",
                    do="put cells with the delimiter in quotes",
                )
            yield dict(zip(names, [*cells, *[None] * (len(names) - len(cells))], strict=True))


def _few(names: Sequence[str]) -> str:
    return printable(", ".join(names[:8])) + (", …" if len(names) > 8 else "")


# --- Parquet -----------------------------------------------------------------------------------------------------


def _pyarrow(entry: SourceFile) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet  # noqa: F401 - an attribute of the package from now on
    except ImportError:
        raise missing_extra("pyarrow", "graph", f"data.path = {entry.path!r}") from None
    return pyarrow


def _parquet(entry: SourceFile) -> Any:
    return _pyarrow(entry).parquet.ParquetFile(entry.path)


def parquet_rows(entry: SourceFile) -> Iterator[Row]:
    """Rows of a Parquet file, read by row groups."""
    with parsing(entry.path, RESTORE), _parquet(entry) as file:
        _check_groups(entry, file)
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def arrow_rows(entry: SourceFile) -> Iterator[Row]:
    """Rows of an Arrow file or stream, as `datasets` saves them and Feather is, by record batches."""
    with parsing(entry.path, RESTORE):
        pa = _pyarrow(entry)
        with pa.memory_map(entry.path) as source:
            if source.read(len(_ARROW)) == _ARROW:
                file = pa.ipc.open_file(source)
                batches = map(file.get_batch, range(file.num_record_batches))
            else:
                source.seek(0)
                batches = pa.ipc.open_stream(source)
            for batch in batches:
                yield from batch.to_pylist()


def parquet_columns(entry: SourceFile) -> list[str]:
    """Names of the columns of a Parquet file."""
    with parsing(entry.path, RESTORE), _parquet(entry) as file:
        return list(file.schema_arrow.names)


class ParquetText(NamedTuple):
    """Texts of some rows: UTF-8 bytes or None, and the number of the last row among all `rows` of the file."""

    texts: list[Any]
    last: int
    rows: int


def parquet_texts(entry: SourceFile, column: str) -> Iterator[ParquetText]:
    """One column of a Parquet file, by row groups; values that are not text are handed on as they are."""
    with parsing(entry.path, RESTORE):
        import pyarrow as pa

        with _parquet(entry) as file:
            stored = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
            _check_groups(entry, file)
            last = 0
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                values = batch.column(0)
                values = values.cast(stored.get(values.type, values.type))
                last += len(values)
                yield ParquetText(values.to_pylist(), last, file.metadata.num_rows)


def _check_groups(entry: SourceFile, file: Any) -> None:
    """Raises UserError where a row group does not fit into memory. Its columns are not asked: PyArrow ends the process
    where one of a damaged file has no sizes."""
    groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
    _check_size(entry, max((group.total_byte_size for group in groups), default=0), 2)


# --- what is left out --------------------------------------------------------------------------------------------


def summary(skipped: Sequence[tuple[str, str]], most: int = 3) -> str:
    """What was left out and why: each reason once, with the first name it has and how many more."""
    names: dict[str, list[str]] = {}
    for name, reason in skipped:
        names.setdefault(reason, []).append(name)
    parts = [
        f"{printable(group[0])}{f' and {len(group) - 1:,} more' if len(group) > 1 else ''}: {printable(reason)}"
        for reason, group in sorted(names.items(), key=lambda item: -len(item[1]))
    ]
    return "; ".join(parts[:most]) + ("; …" if len(parts) > most else "")


def text_fault(value: Any) -> str:
    """Why a value of a row is no text that can be trained on, as a predicate; empty: it is."""
    if value is None:
        return "is null"
    if not isinstance(value, str):
        return f"is {_KINDS.get(type(value), type(value).__name__)}, not text"
    if not value:
        return "is empty"
    return "has a NUL byte" if "\0" in value else encoding_fault(value)


_KINDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    dict: "an object",
    list: "a list",
}


def encoding_fault(value: str) -> str:
    """Why a text cannot be written as UTF-8, as a predicate; empty: it can."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        foreign = 0xDC80 <= ord(value[error.start]) <= 0xDCFF  # what surrogateescape makes of other bytes
        return "is not UTF-8" if foreign else "has half a surrogate pair"
    return ""
