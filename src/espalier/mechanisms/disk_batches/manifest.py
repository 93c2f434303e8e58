"""Manifest of a packed set: what it was made from, so that a stale one is refused, and how far packing has come."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from espalier.comm.rendezvous_wait import Deadline
from espalier.graph.data.graph import Array, Graph
from espalier.recipe import cache_dir, serialization
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing
from espalier.recipe.serialization import Value

FILE = "manifest.json"
LOCK = "lock"
FORMAT = 2
WAIT = 3600.0
"""Seconds in which the ranks of a run wait for the one that packs."""
WHOLE, PIECE, PIECES = 1 << 30, 1 << 20, 256
"""Bytes of an array up to which it is hashed as a whole; of a larger one, so many pieces at so many places."""


class Inputs(Value, frozen=True):
    """What a packed set is a function of: hashes of the graph's edges, of the feature files and of the seeds, the
    draws, the budgets, and the rows in memory where they are another set's."""

    graph: str
    features: dict[str, str]
    seeds: str
    fanouts: tuple[int, ...]
    sampling: str
    rows: str
    disk_rows: int | None
    buffer: int
    hot: str = ""
    format: int = FORMAT


NAMES = {
    "graph": "the edges of the graph",
    "features": "the features",
    "seeds": "the training nodes, their order or the batch size",
    "fanouts": "the fan-outs",
    "sampling": "the seed of the draws, or the network's kind of layer",
    "rows": "how rows are stored (store.rows)",
    "disk_rows": "the disk budget (store.disk)",
    "buffer": "the memory for packing (store.memory)",
    "hot": "the rows that another set keeps in memory",
    "format": "the version of the format",
}


RowError = tuple[float, float]
"""Of packed rows: the largest of a value, and the root of its mean square over that of the values."""


class Packed(Value, frozen=True):
    """What packing has decided and done.

    Attributes:
        nodes: of the graph. batches, hot_rows, length: of the access plan; length is in batches, of a segment.
        width, dtype: of the features.
        ranges: int, passes over parts of the feature file; done: how many of them are on disk; whole: the set is.
        error: largest error of a value, and the root of its mean square over that of the values; zeros with fp32.
    """

    nodes: int
    batches: int
    hot_rows: int
    length: int
    width: int
    dtype: str
    ranges: int
    done: int = 0
    whole: bool = False
    error: RowError = (0.0, 0.0)


class Manifest(Value, frozen=True):
    """Inputs, and what was packed from them; None before the access plan is made. `checksum`: of both, on disk."""

    inputs: Inputs
    packed: Packed | None = None
    checksum: str = ""

    def checked(self) -> Manifest:
        """The same with its checksum."""
        text = msgspec.json.encode((self.inputs, self.packed))
        return self.changed(checksum=xxhash.xxh3_64_hexdigest(text))

    def write(self, folder: Path) -> None:
        """Replaces the manifest of `folder` at once."""
        text = msgspec.json.format(msgspec.json.encode(self.checked()), indent=1).decode()
        cache_dir.replace(folder / FILE, text, "store.path = a folder that this user may write to")

    def refuse_other(self, wanted: Inputs, folder: Path) -> None:
        """Raises UserError naming what is not as it was when `folder` was packed."""
        changed = differences(self.inputs, wanted)
        if changed:
            raise UserError(
                f"{folder} was packed from other inputs: {'; '.join(changed)}.",
                why="packed rows are found by their places, which these decide",
                do=f"store.path = another folder, or remove {folder} to pack it anew",
            )


def differences(before: Inputs, now: Inputs) -> list[str]:
    """What changed, in words."""
    changes = []
    for field, name in NAMES.items():
        old = getattr(before, field)
        new = getattr(now, field)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            files = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            changes.append(f"{name} ({', '.join(files)})")
        else:
            hashed = isinstance(old, str) and len(old) == 16
            changes.append(name if hashed else f"{name} ({_said(old)} then, {_said(new)} now)")
    return changes


def _said(value: object) -> str:
    return "no limit" if value is None else f"{list(value)}" if isinstance(value, tuple) else f"{value}"


def read(folder: Path) -> Manifest | None:
    """The manifest of `folder`; None where there is none. Raises UserError where it cannot be read."""
    file = folder / FILE
    if not file.exists():
        return None
    with parsing(file, f"{repack(folder)}, or restore the file"):
        manifest: Manifest = serialization.from_json(file.read_bytes(), Manifest)
    if manifest.inputs.format == FORMAT and manifest != manifest.checked():
        raise UserError(
            f"{folder / FILE} is damaged.", why="its checksum does not match", do=f"{repack(folder)}, or restore it"
        )
    return manifest


def repack(folder: Path) -> str:
    """What to do about a damaged set, for errors."""
    return f"remove {folder}: the next run packs it anew"


@contextmanager
def locked(folders: Sequence[Path], waits: bool = False) -> Iterator[None]:
    """Makes `folders` and holds the first: one process packs into it. `waits`: until another of the same run has ended,
    which a lock is released by. Raises UserError where another run holds it, or it cannot be written to."""
    folder = folders[0]

    def holder() -> str:
        lock = folder / LOCK
        return f"process {(lock.read_text(errors='replace') if lock.exists() else '') or 'unknown'}"

    def late() -> UserError:
        return UserError(
            f"Another run is packing into {folder}: {holder()}.",
            why=f"waited {WAIT:.0f} s for it" if waits else "two would overwrite each other's rows",
            do="wait until it has ended, or store.path = another folder",
        )

    descriptor = _held(folders)
    if descriptor is None and not waits:
        raise late()
    if descriptor is None:
        limit = Deadline(WAIT, f"Process {os.getpid()}")
        descriptor = limit.poll(lambda: _held(folders), lambda: f"{holder()}, which packs into {folder},", late)
    try:
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        for torn in folder.glob(f".{FILE}.*"):  # of a run that was killed while it replaced the manifest
            torn.unlink()
        yield
    finally:
        os.close(descriptor)


def _held(folders: Sequence[Path]) -> int | None:
    """The lock of the first folder; None: another process has it, or the folder was removed meanwhile."""
    folder = folders[0]
    made = False
    try:
        for path in folders:
            path.mkdir(parents=True, exist_ok=True)
        made = True
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if made and isinstance(error, FileNotFoundError):
            return None
        raise UserError(
            f"store.path = '{error.filename or folder}' cannot be written to: {error.strerror}.",
            do="store.path = a folder that this user may write to, with room for the packed rows",
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
            return descriptor
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            os.close(descriptor)
            raise UserError(f"{folder / LOCK} cannot be locked: {error.strerror}.", do="a local disk") from None
    os.close(descriptor)
    return None


# --- hashes ----------------------------------------------------------------------------------------------------------


def graph_hash(graph: Graph) -> str:
    """Of all that sampling sees: edges, their weights and features."""
    digest = xxhash.xxh3_64(graph.identity.encode())
    for array in (graph.indptr, graph.indices, graph.weights, graph.edge_features):
        digest.update(b"none" if array is None else f"{array.dtype}{array.shape}".encode())
        if array is not None:
            _add(digest, array.reshape(-1))
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_64, flat: Array) -> None:
    count = max(1, PIECE // flat.itemsize)
    if flat.nbytes <= WHOLE:
        places = range(0, len(flat), count)
    else:
        places = range(0, len(flat) - count + 1, max(1, (len(flat) - count) // (PIECES - 1)))
    for at in places:
        digest.update(np.ascontiguousarray(flat[at : at + count]).data)


def ids_hash(ids: Array) -> str:
    """Of node ids in their order."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids, np.int64).data)


def seeds_hash(seeds: Sequence[Array], steps: Sequence[int]) -> str:
    """Of the seeds of every batch, and of its step."""
    digest = xxhash.xxh3_64()
    for ids, step in zip(seeds, steps, strict=True):
        digest.update(f"{len(ids)} {step} ".encode())
        digest.update(np.ascontiguousarray(ids, np.int64).data)
    return digest.hexdigest()
