"""What a run keeps of its preprocessing, brought to hosts that do not have its folder. Imports no torch.

Without it they would derive tokenizer and classes from their own data, which may have changed since the run began.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from espalier.comm.rendezvous_wait import Deadline
from espalier.recipe import serialization
from espalier.recipe.cache_dir import cache_folder, replace_folder, unwritable
from espalier.recipe.errors import PeerLost, UserError
from espalier.train.run_folder import RunFolder

LIMIT = 64 << 20
"""Bytes that are sent. Above it (a large graph) hosts derive the same from the same data, and what they have is
compared."""

_PIECE = 1 << 20  # of a value in a store


def packed(run: Path) -> str:
    """What the run in `run` keeps, as text; empty where there is no such run, or it keeps nothing or more than `LIMIT`.
    Raises UserError where it is not as it was written."""
    folder = RunFolder(run)
    kept = folder.kept() if folder.exists() else None
    files = [] if kept is None else [one for one in sorted(kept.rglob("*")) if one.is_file()]
    if kept is None or sum(one.stat().st_size for one in files) > LIMIT:
        return ""
    table = {str(one.relative_to(kept)): one.read_bytes() for one in files}
    return base64.b64encode(zlib.compress(serialization.dumps(table), 1)).decode()


def unpacked(text: str) -> Path | None:
    """The folder in this host's cache with what was `packed`; None where that is empty. Raises UserError."""
    if not text:
        return None
    table = serialization.loads(zlib.decompress(base64.b64decode(text)), "What the first host keeps of its data")
    home = cache_folder() / "runs" / hashlib.sha256(text.encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        for name, content in table.items():
            target = (folder / name).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise UserError(f"The first host sent a file {name!r}, which is in no run folder.")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    found = RunFolder(home)
    try:
        if found.kept() is None:
            home.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=home) as made:  # hosts may share a cache: who is first brings it, whole
                replace_folder(Path(made, "made"), fill)
                try:
                    Path(made, "made").rename(found.preprocessing)
                except OSError:
                    if not found.preprocessing.exists():
                        raise
    except OSError as error:
        raise unwritable(home, error) from error
    return found.kept()


def shared(store: Any, key: str, own: Path | None, deadline: Deadline) -> Path | None:
    """What the run of the first rank keeps, in a folder of this host. `store`: a torch Store that all ranks reach;
    `own`: the run's folder, on the first rank alone. Raises PeerLost where the first rank has not said it by then."""
    if own is not None:
        text = packed(own)
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        for at, piece in enumerate(pieces):
            store.set(f"{key}/{at}", piece)
        store.set(key, str(len(pieces)))
        return RunFolder(own).kept() if text else None
    count = deadline.poll(
        lambda: int(store.get(key)) if store.check([key]) else None,
        lambda: "what rank 0 keeps of the run",
        lambda: PeerLost("Rank 0 did not say what it keeps of the run.", why=deadline.waited, do="look at its log"),
    )
    return unpacked("".join(store.get(f"{key}/{at}").decode() for at in range(count)))
