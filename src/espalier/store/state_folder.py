"""State folder: generations in a folder (or striped over folders on several disks), for one process at a time."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from espalier.recipe.cache_dir import sync_folder
from espalier.recipe.errors import UserError
from espalier.store.cost import pages
from espalier.store.direct_io import check_room
from espalier.store.generations import Generations

_RETRY = 0.02
"""Seconds between two attempts to lock a folder."""


@contextmanager
def locked(folder: Path, wait: float = 5.0) -> Iterator[None]:
    """Inside, no other process serves from `folder`. Raises UserError where one does for longer than `wait` seconds."""
    until = time.monotonic() + wait
    file = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UserError(
                        f"Another process serves from {folder}.",
                        why="two runs cannot share the state of one",
                        do="name another folder in store.path, or wait until that run has ended",
                    ) from None
                time.sleep(_RETRY)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield
    finally:
        os.close(file)


def open_or_create(
    folders: Sequence[Path],
    layout: bytes,
    sizes: Mapping[str, int],
    fill: Callable[[Generations], None],
) -> Generations:
    """The state in `folders`, of the last step that is whole there; where there is none, a new one.

    Args:
        folders: of one state, one on each disk.
        layout: describes what the entries mean; that of a state in the folders must be the same.
        sizes: bytes of each entry.
        fill: writes and commits the first values.

    Raises:
        UserError: it has another layout; or it cannot be read or written.
        DiskFull: there is no room for it.
    """
    files = [folder / "state" for folder in folders]
    description = folders[0] / "job.json"
    if files[0].exists():
        if not description.exists() or description.read_bytes() != layout:
            raise UserError(
                f"{folders[0]} holds the state of another model.",
                why="names, shapes, their order, `pull`, the size of chunks or the layout of the file differ",
                do="start a new run with --run FOLDER, or name another folder in store.path",
            )
        return Generations(files, verify=True)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder, 2 * sum(map(pages, sizes.values())) // len(folders), "the state of an optimizer node")
    parts = [folder / "state.part" for folder in folders]
    with Generations.create(parts, sizes) as state:
        fill(state)
    description.write_bytes(layout)
    for part, file in reversed(list(zip(parts, files, strict=True))):  # the first tells that all are there
        part.rename(file)
        sync_folder(file.parent)
    return Generations(files)
