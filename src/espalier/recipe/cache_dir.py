"""Cache directory, and atomic writes of whole files. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from espalier.recipe import units
from espalier.recipe.errors import EspalierError, UserError

ANOTHER_RUN = "choose another folder with --run FOLDER"
CACHE = "XDG_CACHE_HOME = a folder on another disk"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/espalier`, else `~/.cache/espalier`: token shards, the probe's result, trials."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "espalier"


def is_url(place: str) -> bool:
    """Whether `place` names something other than a path of this machine."""
    return "://" in place and not place.startswith("file://")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes `content` to `path` whole or not at all: temporary file, fsync, rename. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def keep_made(path: Path, write: Callable[[Path], None]) -> None:
    """Keeps in the cache, at `path`, the file that `write` makes beside it: whole, or where that is not possible not at
    all."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial{path.suffix}")
        write(partial)
        partial.replace(path)


def replace(path: Path, text: str, do: str = ANOTHER_RUN) -> None:
    """As `write_atomic`. Raises UserError, which says what to `do`, when it cannot be written."""
    with writing(path, do):
        write_atomic(path, text)


def claim(path: Path, content: bytes, mode: int = 0o666) -> bytes:
    """What the file at `path` holds: `content`, where nobody was first. It is there whole or not at all, whoever asks
    at the same moment and whenever this process is killed. `mode`: its permissions. Raises OSError."""
    if not path.exists():
        partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _first(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path.read_bytes()


def _first(partial: Path, path: Path) -> None:
    """Gives the file `partial` the name `path` too, unless that is taken."""
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links, where two at the same moment are not told apart
        if not path.exists():
            os.replace(partial, path)


BEFORE = ".before"
"""Ends the name of a folder while another takes its place."""


def replace_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Makes `target` a folder with what `fill` writes, whole or not at all: a folder beside it, fsync, rename.

    Killed between two renames, the folder that was there is at `target` + `BEFORE`. Raises OSError, and what `fill`
    raises.
    """
    partial, before = target.with_name(target.name + ".partial"), target.with_name(target.name + BEFORE)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        for written in (*partial.rglob("*"), partial):
            sync_folder(written)
        if target.exists():
            shutil.rmtree(before, ignore_errors=True)
            target.rename(before)
        partial.rename(target)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def export(target: Path, mark: str, fill: Callable[[Path], None]) -> None:
    """`replace_folder` for what is exported; every export holds a file `mark`. Raises UserError when `target` is
    something else, or cannot be written. Others may read what the user's umask lets them."""

    def readable(folder: Path) -> None:
        folder.joinpath(".mode").touch()
        mode = folder.joinpath(".mode").stat().st_mode
        folder.joinpath(".mode").unlink()
        fill(folder)
        for file in (path for path in folder.rglob("*") if path.is_file()):
            file.chmod(mode)  # safetensors makes files that their owner alone may read

    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / mark).exists())):
        raise UserError(f"{target} is there already and is not an export.", do="name a folder that does not exist")
    with writing(target, "name another folder"):
        replace_folder(target, readable)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder`, or what is in a file, durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def table(path: Path) -> dict[str, Any]:
    """The JSON table kept at `path`; empty where there is none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class DiskFull(UserError):
    """A disk, a quota or a limit on file sizes has no room for what is written. Exit code 2."""


def disk_full(path: str | Path, missing: int, why: str, do: str) -> DiskFull:
    """The error for a disk that lacks `missing` bytes of what is written to `path`."""
    lacks = f"{missing:,} bytes more ({units.show_size(missing)}) are needed"
    return DiskFull(f"The disk of {path} is full: {lacks}.", why=why, do=do)


def unwritable(path: str | Path, error: OSError, do: str = ANOTHER_RUN, size: int = 0) -> UserError:
    """The error for a file or folder that cannot be written, with what to do about its cause. `size`: bytes that were
    to be written, of which it says how many the disk lacks; 0: not known."""
    reason = error.strerror or str(error)
    if error.errno not in FULL:
        return UserError(f"Cannot write {path}.", why=reason, do=do)
    do = f"free space there and run the same command again, or {do}"
    free = 0 if is_url(str(path)) or error.errno == errno.EFBIG else free_bytes(Path(path))
    if size:
        return disk_full(path, max(1, size - free), reason, do)
    room = f"; {free:,} bytes are free" if free else ""
    return DiskFull(f"The disk is full: could not write {path}.", why=reason + room, do=do)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the disk that `path` is on, or would be."""
    there = path.absolute()
    return shutil.disk_usage(next(place for place in (there, *there.parents) if place.exists())).free


@contextmanager
def writing(path: str | Path, do: str = ANOTHER_RUN, size: Callable[[], int] = int) -> Iterator[None]:
    """Raises `unwritable` for an OSError of what is written to `path` inside, also for one that a library wrapped.
    `size`: gives the bytes that are still to come, for which there must be room before anything is written; 0: not
    known."""
    needed = size()
    if needed and not is_url(str(path)) and needed > free_bytes(Path(path)):
        raise unwritable(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), do, needed)
    try:
        yield
    except EspalierError:
        raise
    except Exception as error:
        seen: BaseException | None = error
        while seen is not None:
            if (number := re.search(r"os error (\d+)", str(seen))) and not isinstance(seen, OSError):  # of safetensors
                seen = OSError(int(number[1]), os.strerror(int(number[1])))
            if isinstance(seen, OSError):
                raise unwritable(path, seen, do, size()) from error
            seen = seen.__cause__ or seen.__context__
        raise


def hashed(value: Any) -> str:
    """A short hash of any plain value, the same on every machine."""
    import hashlib

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
