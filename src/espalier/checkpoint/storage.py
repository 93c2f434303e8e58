"""Checkpoint storage: a local folder, or anything fsspec can write to (`s3://…`, `gs://…`, `memory://…`).

A local checkpoint is written as `step-N.tmp` and renamed when it is whole. Stores of objects cannot rename, so there
the manifest goes up last: a folder without one is not a checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol, cast

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader

from espalier.cache_dir import sync_folder
from espalier.checkpoint import manifest
from espalier.checkpoint.write_rate import WriteLimit
from espalier.errors import UserError, missing_extra

_FOLDER = re.compile(r"^step-(\d{8,})$")


class Storage(Protocol):
    """A folder of checkpoints. Methods take the name of one checkpoint (`step-00000100`)."""

    def names(self) -> list[str]:
        """Names of what looks like a checkpoint, oldest first."""

    def begin(self, name: str) -> Path:
        """The local folder into which this rank writes `name`."""

    def clean(self, name: str) -> None:
        """Removes what broken saves left, and anything that would stand in the way of `name`. One rank only."""

    def publish(self, name: str, files: Sequence[str], limit: WriteLimit | None = None) -> None:
        """Brings this rank's `files` of `name` to where all ranks see them, no faster than `limit` says."""

    def commit(self, name: str, content: manifest.Manifest) -> None:
        """Makes `name` a checkpoint. One rank only, after every rank published."""

    def abandon(self, name: str) -> None:
        """Forgets the unfinished `name`."""

    def remove(self, name: str) -> None:
        """Deletes the checkpoint `name`."""

    def open(self, name: str, file: str) -> IO[bytes]:
        """One file of `name`, for reading."""

    def reader(self, name: str) -> StorageReader:
        """torch's reader of `name`."""

    def path(self, name: str) -> str:
        """What people call `name`."""


def folder_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name, or None for any other name."""
    found = _FOLDER.match(name)
    return int(found[1]) if found else None


def open_place(target: str | Path) -> Storage:
    """The place `target` names: a path, `file://…`, or a URL of fsspec's. Raises UserError for an unknown scheme."""
    text = str(target)
    if text.startswith("file://"):
        return Folder(Path(text.removeprefix("file://")))
    if isinstance(target, Path) or "://" not in text:
        return Folder(Path(target))
    return Remote(text)


class Folder:
    """Checkpoints in a folder every rank can reach."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def names(self) -> list[str]:
        """See Place."""
        try:
            found = [entry.name for entry in self.root.iterdir() if _FOLDER.match(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found, key=lambda name: step_of(name) or 0)

    def begin(self, name: str) -> Path:
        """See Place."""
        path = self._unfinished(name)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def clean(self, name: str) -> None:
        """See Place."""
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
        with (unfinished / manifest.NAME).open("wb") as written:
            written.write(manifest.dumps(content))
            written.flush()
            os.fsync(written.fileno())
        sync_folder(unfinished)
        if (self.root / name).exists():
            self.remove(name)
        unfinished.rename(self.root / name)
        sync_folder(self.root)

    def abandon(self, name: str) -> None:
        """See Place."""
        shutil.rmtree(self._unfinished(name), ignore_errors=True)

    def remove(self, name: str) -> None:
        """Renames first, so that a kill while deleting leaves no half checkpoint under a good name."""
        gone = self.root / f"{name}.old.tmp"
        shutil.rmtree(gone, ignore_errors=True)
        (self.root / name).rename(gone)
        shutil.rmtree(gone)

    def open(self, name: str, file: str) -> IO[bytes]:
        """See Place."""
        return (self.root / name / file).open("rb")

    def reader(self, name: str) -> StorageReader:
        """See Place."""
        return FileSystemReader(self.root / name)

    def path(self, name: str) -> str:
        """See Place."""
        return str(self.root / name)

    def _unfinished(self, name: str) -> Path:
        return self.root / f"{name}.tmp"


class Remote:
    """Checkpoints at a URL of fsspec's. Each rank writes to a temporary folder first, then uploads its files."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs

            self.fs, self.root = url_to_fs(url)
        except ImportError as error:
            raise missing_extra(error.name or "fsspec", "hub", f"checkpoint.target = {url!r}") from None
        except ValueError as error:
            raise UserError(
                f"checkpoint.target = {url!r} is not a place fsspec knows.",
                why=str(error),
                do="name a folder, or a URL such as s3://bucket/run",
            ) from None
        self.url = url.rstrip("/")
        self._local: dict[str, Path] = {}

    def names(self) -> list[str]:
        """Only folders that have a manifest: without one an upload never ended."""
        found = [name for name in self._folders() if self.fs.exists(self._at(name, manifest.NAME))]
        return sorted(found, key=lambda name: step_of(name) or 0)

    def begin(self, name: str) -> Path:
        """See Place."""
        self._local[name] = Path(tempfile.mkdtemp(prefix="espalier-"))
        return self._local[name]

    def clean(self, name: str) -> None:
        """See Place."""
        for folder in self._folders():
            if folder == name or not self.fs.exists(self._at(folder, manifest.NAME)):
                self.remove(folder)

    def publish(self, name: str, files: Sequence[str], limit: WriteLimit | None = None) -> None:
        """See Place. With a limit a file goes up piece by piece, else as the store does it best."""
        self.fs.makedirs(self._at(name), exist_ok=True)
        for file in files:
            if limit is None:
                self.fs.put_file(str(self._local[name] / file), self._at(name, file))
                continue
            with (self._local[name] / file).open("rb") as source, self.fs.open(self._at(name, file), "wb") as target:
                limit.copy(source, target)

    def commit(self, name: str, content: manifest.Manifest) -> None:
        """See Place."""
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
        """See Place."""
        return cast("IO[bytes]", self.fs.open(self._at(name, file), "rb"))

    def reader(self, name: str) -> StorageReader:
        """See Place."""
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(self.path(name))

    def path(self, name: str) -> str:
        """See Place."""
        return f"{self.url}/{name}"

    def _folders(self) -> list[str]:
        try:
            listed: list[Any] = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return [name for name in (str(path).rstrip("/").rpartition("/")[2] for path in listed) if _FOLDER.match(name)]

    def _at(self, *parts: str) -> str:
        return "/".join((str(self.root).rstrip("/"), *parts))
