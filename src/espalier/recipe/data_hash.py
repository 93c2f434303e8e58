"""Hashes of the data a run was trained on: kept in the run folder and compared when the run resumes.

A hash is kept by path, size and times, so that an unchanged file is read once. Of a file above `WHOLE` bytes its size,
its ends and pieces in between are hashed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from espalier.recipe.cache_dir import cache_folder, replace, table
from espalier.recipe.errors import UserError

WHOLE = 64 << 20
"""Bytes up to which a file is hashed as a whole."""

PIECE, PIECES = 1 << 20, 32
"""Of a larger file: so many bytes at so many places, evenly apart, the first and the last included."""

_KEPT = 100_000  # files in the list of known hashes, before it is begun anew


def hashes(files: Mapping[str, str | Path]) -> dict[str, str]:
    """Name to hash, of the files at these paths. A file that cannot be read has the hash "unreadable"."""
    cache = cache_folder() / "contents.json"
    known: dict[str, str] = table(cache)
    hashes_by_name, fresh = {}, {}
    for name, path in files.items():
        try:
            status = os.stat(path)
            key = f"{Path(path).absolute()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
            hashes_by_name[name] = known.get(key) or _hash(Path(path), status.st_size)
            fresh[key] = hashes_by_name[name]
        except OSError:
            hashes_by_name[name] = "unreadable"
    if not fresh.keys() <= known.keys():
        with suppress(OSError, UserError):  # without it files are read again
            cache.parent.mkdir(parents=True, exist_ok=True)
            replace(cache, json.dumps({**(known if len(known) < _KEPT else {}), **fresh}))
    return hashes_by_name


def below(path: Path) -> dict[str, str]:
    """Hashes of a file, or of all files in a folder, by their paths."""
    if not path.is_dir():
        return hashes({str(path): path})
    return hashes({str(file): file for file in sorted(path.rglob("*")) if file.is_file()})


def in_folder(folder: Path) -> dict[str, str]:
    """Hashes of all files in `folder` by their paths in it; what Python compiles there is left out."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)
    return hashes({str(file.relative_to(folder)): file for file in files})


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What happened to each file that is not as it was, in words."""
    words = [(name, "has vanished") for name in before.keys() - now.keys()]
    words += [(name, "is new") for name in now.keys() - before.keys()]
    words += [(name, "has changed") for name in before.keys() & now.keys() if before[name] != now[name]]
    return [f"{name} {what}" for name, what in sorted(words)]


def of_file(path: Path) -> str:
    """xxh3-128 of all that is in a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def of_arrays(*arrays: Any) -> str:
    """xxh3-128 of the bytes of NumPy arrays, one after the other."""
    digest = xxhash.xxh3_128()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()


def _hash(path: Path, size: int) -> str:
    digest = xxhash.xxh3_128(str(size).encode())
    with path.open("rb") as file:
        several = ((size - PIECE) * place // (PIECES - 1) for place in range(PIECES))
        for start in range(0, size, PIECE) if size <= WHOLE else several:
            file.seek(start)
            digest.update(file.read(PIECE))
    return digest.hexdigest()
