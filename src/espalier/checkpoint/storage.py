"""Checkpoint storage: a local folder, or a store of objects that fsspec reaches (`s3://…`, `gs://…`, `abfs://…`).

A local checkpoint is written as `step-N.tmp` and renamed when it is whole. Stores of objects cannot rename, so there
the manifest goes up last: a folder without one is not a checkpoint.
"""

from __future__ import annotations

import contextlib
import glob
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from espalier.checkpoint import manifest
from espalier.checkpoint.run_identity import OWNER
from espalier.checkpoint.write_rate import WriteLimit
from espalier.recipe import cache_dir
from espalier.recipe.cache_dir import is_url, sync_folder, writing
from espalier.recipe.errors import EspalierError, RunFailed, UserError, missing_extra
from espalier.recipe.foreign_files import printable

_FOLDER = re.compile(r"^step-(\d{8,})$")


PROTOCOLS = ("file", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
"""Of a URL: folders, stores of objects (Amazon, Google, Azure), and a process's memory. fsspec has more, also some that
run commands or ask any server."""


def folder_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name, or None for any other name."""
    match = _FOLDER.match(name)
    return int(match[1]) if match else None


def open_place(target: str | Path) -> Storage:
    """The place `target` names: a path, `file://…`, or a URL of `PROTOCOLS`. Raises UserError for any other."""
    text = str(target)
    if text.startswith("file://"):
        return Folder(Path(text.removeprefix("file://")))
    if isinstance(target, Path) or not is_url(text):
        return Folder(Path(target))
    protocol = text.partition("://")[0]
    if protocol not in PROTOCOLS:
        raise UserError(
            f"checkpoint.target = {printable(text)!r} is no place for checkpoints.",
            why=f"{printable(protocol)} is none of {', '.join(PROTOCOLS)}",
            do="name a folder, or a URL such as s3://bucket/run",
        )
    return Remote(text)


def read_manifest(place: Storage, name: str) -> manifest.Manifest:
    """The manifest of checkpoint `name`. Raises Bad when it is damaged or missing, OSError, UserError."""
    try:
        with place.open(name, manifest.NAME) as file:
            return manifest.loads(file.read())
    except FileNotFoundError:
        raise manifest.Bad(f"{manifest.NAME} is missing") from None


class Folder:
    """Checkpoints in a folder every rank can reach."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def names(self) -> list[str]:
        """Names of what looks like a checkpoint, oldest first."""
        try:
            names = [entry.name for entry in self.root.iterdir() if _FOLDER.match(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(names, key=lambda name: step_of(name) or 0)

    def begin(self, name: str) -> Path:
        """The local folder into which this rank writes `name`."""
        path = self._unfinished(name)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def clean(self, name: str) -> None:
        """Removes what broken saves left, and anything that would stand in the way of `name`. One rank only."""
        if self.root.is_dir():
            for entry in self.root.glob("step-*.tmp"):
                shutil.rmtree(entry)

    def publish(self, name: str, files: Sequence[str], limit: WriteLimit | None = None) -> None:
        """Nothing to bring: the writer has synced the files, and all ranks see the folder."""

    def commit(self, name: str, content: manifest.Manifest) -> None:
        """Checks that every file is seen from here, then renames, with everything on the disk before the name is."""
        unfinished = self._unfinished(name)
        for file in content.files:
            if not (unfinished / file).is_file():
                raise UserError(
                    f"checkpoint.target = {str(self.root)!r} is not the same folder on every host.",
                    why=f"rank 0 does not see {file}, which another rank wrote",
                    do="name a folder on a shared file system, or a URL such as s3://bucket/run",
                )
        (unfinished / manifest.NAME).write_bytes(manifest.dumps(content))
        sync_folder(unfinished / manifest.NAME)
        sync_folder(unfinished)
        if (self.root / name).exists():
            self.remove(name)
        unfinished.rename(self.root / name)
        sync_folder(self.root)

    def abandon(self, name: str) -> None:
        """Forgets the unfinished `name`."""
        shutil.rmtree(self._unfinished(name), ignore_errors=True)

    def remove(self, name: str) -> None:
        """Renames first, so that a kill while deleting leaves no half checkpoint under a good name."""
        gone = self.root / f"{name}.old.tmp"
        shutil.rmtree(gone, ignore_errors=True)
        (self.root / name).rename(gone)
        shutil.rmtree(gone)

    def open(self, name: str, file: str) -> IO[bytes]:
        """One file of `name`, for reading."""
        return (self.root / name / file).open("rb")

    def path(self, name: str) -> str:
        """What people call `name`."""
        return str(self.root / name)

    def claim(self, content: bytes) -> bytes:
        """Writes `content` as `owner.json` beside the checkpoints, unless there is one; gives what is there then."""
        path = self.root / OWNER
        with writing(path, "name another checkpoint.target"):
            self.root.mkdir(parents=True, exist_ok=True)
            return cache_dir.claim(path, content)

    def owner(self) -> bytes | None:
        """What `owner.json` beside the checkpoints holds; None without one."""
        path = self.root / OWNER
        with writing(path, "name another checkpoint.target"):
            return path.read_bytes() if path.is_file() else None

    def owned_folders(self, beginning: str) -> list[str]:
        """Names of the folders in this one that begin so and have an `owner.json`."""
        return sorted(path.parent.name for path in self.root.glob(f"{glob.escape(beginning)}*/{OWNER}"))

    def _unfinished(self, name: str) -> Path:
        return self.root / f"{name}.tmp"


class Remote:
    """Checkpoints at a URL of fsspec's. Each rank writes to a temporary folder first, then uploads its files."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            with _asking(url):
                self.fs, self.root = url_to_fs(url)
        except ImportError as error:
            raise missing_extra(error.name or "fsspec", "hub", f"checkpoint.target = {url!r}") from None
        self.url = url.rstrip("/")
        self._local: dict[str, Path] = {}

    def names(self) -> list[str]:
        """Only folders that have a manifest: without one an upload never ended. Raises RunFailed where the store
        does not answer."""
        with _asking(self.url):
            whole = [name for name in self._folders() if self.fs.exists(self._at(name, manifest.NAME))]
        return sorted(whole, key=lambda name: step_of(name) or 0)

    def begin(self, name: str) -> Path:
        self._local[name] = Path(tempfile.mkdtemp(prefix="espalier-"))
        return self._local[name]

    def clean(self, name: str) -> None:
        for folder in self._folders():
            if folder == name or not self.fs.exists(self._at(folder, manifest.NAME)):
                self.remove(folder)

    def publish(self, name: str, files: Sequence[str], limit: WriteLimit | None = None) -> None:
        """See Folder. With a limit a file goes up piece by piece, else as the store does it best."""
        self.fs.makedirs(self._at(name), exist_ok=True)
        for file in files:
            if limit is None:
                self.fs.put_file(str(self._local[name] / file), self._at(name, file))
                continue
            with (self._local[name] / file).open("rb") as source, self.fs.open(self._at(name, file), "wb") as target:
                limit.copy(source, target)

    def commit(self, name: str, content: manifest.Manifest) -> None:
        self.fs.pipe_file(self._at(name, manifest.NAME), manifest.dumps(content))

    def abandon(self, name: str) -> None:
        """Also called after a commit, to give the temporary folder back."""
        local = self._local.pop(name, None)
        if local is not None:
            shutil.rmtree(local, ignore_errors=True)

    def remove(self, name: str) -> None:
        """The manifest first: from then on it is no checkpoint."""
        if self.fs.exists(self._at(name, manifest.NAME)):
            self.fs.rm_file(self._at(name, manifest.NAME))
        self.fs.rm(self._at(name), recursive=True)

    def open(self, name: str, file: str) -> IO[bytes]:
        """See Folder. What a store's client raises is an OSError."""
        try:
            return cast("IO[bytes]", self.fs.open(self._at(name, file), "rb"))
        except (OSError, MemoryError):
            raise
        except Exception as error:  # clients of stores have no common base of their errors
            raise OSError(f"{type(error).__name__}: {printable(error)}") from error

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def claim(self, content: bytes) -> bytes:
        """See Folder. Stores have no lock: of two that ask at the same moment the later one is there."""
        if self.owner() is None:
            with _asking(self.url):
                self.fs.makedirs(str(self.root), exist_ok=True)
                self.fs.pipe_file(self._at(OWNER), content)
        return self.owner() or content

    def owner(self) -> bytes | None:
        path = self._at(OWNER)
        with _asking(self.url):
            return cast("bytes", self.fs.cat_file(path)) if self.fs.exists(path) else None

    def owned_folders(self, beginning: str) -> list[str]:
        with _asking(self.url):
            paths: list[Any] = self.fs.glob(self._at(f"{glob.escape(beginning)}*", OWNER))
        return sorted(str(path).split("/")[-2] for path in paths)

    def _folders(self) -> list[str]:
        try:
            listed: list[Any] = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return [name for name in (str(path).rstrip("/").rpartition("/")[2] for path in listed) if _FOLDER.match(name)]

    def _at(self, *parts: str) -> str:
        return "/".join((str(self.root).rstrip("/"), *parts))


Storage = Folder | Remote
"""A folder of checkpoints. Methods take the name of one checkpoint (`step-00000100`)."""


@contextlib.contextmanager
def _asking(url: str) -> Iterator[None]:
    """Turns what fsspec and the client of a store raise into one error: UserError for an address that is none, else
    RunFailed, as a network may be there again."""
    try:
        yield
    except (EspalierError, ImportError, MemoryError):
        raise
    except Exception as error:  # clients of stores have no common base of their errors
        reason = printable(error).rstrip(".") or "it gives no reason"
        kind = UserError if isinstance(error, ValueError) else RunFailed
        raise kind(
            f"checkpoint.target = {printable(url)!r} cannot be reached.",
            why=f"{type(error).__name__}: {reason}",
            do="check the address, the network and your credentials for it",
        ) from error
