"""Where things that outlive a run are kept, and how a file is written whole. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from espalier.errors import UserError


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/espalier`, else `~/.cache/espalier`: token shards, the probe's result, trials."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "espalier"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes `content` to `path` whole or not at all: temporary file, fsync, rename. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace(path: Path, text: str) -> None:
    """As `write_atomic`. Raises UserError, also on a full disk."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise cannot_write(path, error) from None


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def table(path: Path) -> dict[str, Any]:
    """The JSON table kept at `path`; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def cannot_write(path: Path, error: OSError) -> UserError:
    """The UserError for an OSError met while writing `path`."""
    if error.errno == errno.ENOSPC:
        return UserError(f"The disk is full: {path} could not be written.", do="free some space, then run again")
    return UserError(f"{path} cannot be written: {error.strerror}.", do="give another folder with --run")


def hashed(value: Any) -> str:
    """A short hash of any plain value, the same on every machine."""
    import hashlib

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
