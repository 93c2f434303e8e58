"""The file of packages: named matrices and plain facts, whose every byte is checked.

The paper leaves the file open; ours is

    b"ESPKG3\\0\\0" | length of the header (u32) | XXH3 of length and header (u64) | header (JSON) | streams, each
    filled up to 8 bytes

(numbers little-endian), with the streams `packages`, `occupied` (bitmap or lists), `index` (for every 256 rows where
their first code is), `rows` (for each row the number of its pair) and `pairs` (width and step code, two bytes each).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from espalier.mechanisms.few_bits.mega.package import OCCUPIED, PackedRows, Sizes
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing

MAGIC = b"ESPKG3\0\0"
FIRST = len(MAGIC) + 4 + 8
"""Bytes before the header."""
STREAMS = ("packages", "occupied", "index", "rows", "pairs")


def write(path: Path, matrices: Mapping[str, PackedRows], facts: Mapping[str, Any] | None = None) -> int:
    """Writes named matrices, and `facts` (plain values) beside them; the file's length in bytes."""
    return path.write_bytes(to_bytes(matrices, facts))


def to_bytes(matrices: Mapping[str, PackedRows], facts: Mapping[str, Any] | None = None) -> bytes:
    """The file."""
    table: dict[str, Any] = {"facts": dict(facts or {}), "matrices": {}}
    body = bytearray()
    for name, matrix in matrices.items():
        places = {}
        for stream in STREAMS:
            data = matrix.streams[stream].tobytes()
            places[stream] = [len(body), len(data), xxhash.xxh3_64_hexdigest(data)]
            body += data + b"\0" * (-len(data) % 8)
        table["matrices"][name] = {
            "rows": matrix.rows,
            "columns": matrix.columns,
            "signed": matrix.signed,
            "occupied": matrix.occupied,
            "sizes": astuple(matrix.sizes),
            "streams": places,
        }
    table["length"] = len(body)
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(FIRST + len(header)) % 8)
    length = len(header).to_bytes(4, "little")
    return MAGIC + length + _hash(length, header) + header + bytes(body)


def _hash(length: bytes, header: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(length + header).to_bytes(8, "little")


def file_sizes(data: bytes) -> Sizes:
    """What the bits of a file are for: together 8 times its length."""
    length = FIRST + int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
    sizes = [matrix["sizes"] for matrix in json.loads(data[FIRST:length])["matrices"].values()]
    total = Sizes(*(sum(parts) for parts in zip((0,) * 6, *sizes, strict=True)))
    filled = 8 * (len(data) - length) - total.total
    return replace(total, header=total.header + 8 * length, padding=total.padding + filled)


def read(path: Path) -> tuple[dict[str, PackedRows], dict[str, Any]]:
    """Matrices and facts of the file at `path`. Raises UserError naming the byte at which it is cut off or damaged."""
    with parsing(path, "espalier export RUN --to packed"):
        return from_bytes(path.read_bytes(), str(path))


def from_bytes(data: bytes, name: str = "the package") -> tuple[dict[str, PackedRows], dict[str, Any]]:
    """See `read`."""

    def damaged(at: int, why: str) -> UserError:
        return UserError(f"{name} is damaged at byte {at:,}: {why}.", do="espalier export RUN --to packed")

    body = _header_end(data, damaged)
    try:
        table = json.loads(data[FIRST:body])
        wanted = body + int(table["length"])
        if len(data) != wanted:
            raise damaged(min(len(data), wanted), f"{len(data):,} bytes are there, and {wanted:,} were written")
        return (
            {key: _matrix(key, entry, data, body, damaged) for key, entry in table["matrices"].items()},
            table["facts"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(FIRST, f"its header cannot be read ({error})") from None


def _header_end(data: bytes, damaged: Callable[[int, str], UserError]) -> int:
    """Where the header ends, which is what was written."""
    if not data.startswith(MAGIC[: len(data)]):
        other = data.startswith(MAGIC[:5])
        raise damaged(5 * other, "its version is not known" if other else "it does not begin as a package does")
    if len(data) < FIRST:
        raise damaged(len(data), "it ends there")
    length = data[len(MAGIC) : len(MAGIC) + 4]
    body = FIRST + int.from_bytes(length, "little")
    if len(data) < body:
        raise damaged(len(data), f"it ends there, and its header at {body:,}")
    if _hash(length, data[FIRST:body]) != data[FIRST - 8 : FIRST]:
        raise damaged(len(MAGIC), f"its header, until {body:,}, is not what was written")
    return body


def _matrix(
    key: str, entry: Mapping[str, Any], data: bytes, body: int, damaged: Callable[[int, str], UserError]
) -> PackedRows:
    """Of a header's entry. Raises ValueError: a field is not what it may be."""
    streams = {}
    for stream in STREAMS:
        start, count, digest = entry["streams"][stream]
        piece = data[body + start : body + start + count]
        if xxhash.xxh3_64_hexdigest(piece) != digest:
            raise damaged(body + start, f"{stream} of {key} are not what was written")
        if any(data[body + start + count : body + start + count + -count % 8]):
            raise damaged(body + start + count, f"{stream} of {key} end there, and more follows")
        streams[stream] = np.frombuffer(bytearray(piece), np.uint8)
    shape = entry["rows"], entry["columns"], entry["signed"], entry["occupied"]
    if [type(field) for field in shape] != [int, int, bool, str] or min(shape[:2]) < 0 or shape[3] not in OCCUPIED:
        raise ValueError(f"no matrix is {shape}")
    return PackedRows(*shape, streams, Sizes(*entry["sizes"]))
