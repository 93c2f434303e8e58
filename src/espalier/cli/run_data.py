"""The data of a run: its hashes, compared when the run is taken up again, and what preprocessing decided of it, which
hosts without the run's folder are sent: else they would derive tokenizer and classes from their own data, which may
have changed since. Imports no torch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from espalier.comm.rendezvous_wait import Deadline
from espalier.recipe import Recipe, cache_dir, data_hash, serialization
from espalier.recipe.cache_dir import cache_folder, replace_folder, writing
from espalier.recipe.errors import PeerLost, UserError
from espalier.recipe.foreign_files import parsing
from espalier.track import events
from espalier.train import run_folder as runs
from espalier.train.run_folder import RunFolder

if TYPE_CHECKING:
    from espalier.parallel.workload import Workload


class DataRecord(msgspec.Struct, frozen=True):
    """What `data.json` holds: a hash for each file of the data, and the notes of its readers (`Workload.notes`), as on
    what they did not use."""

    hashes: Mapping[str, str]
    notes: tuple[str, ...] = ()


def read_record(folder: RunFolder) -> DataRecord | None:
    """What the run's `data.json` holds; None where there is none. Raises UserError for a damaged one."""
    if not folder.data.exists():
        return None
    with parsing(folder.data, "remove it; the present data is then accepted"):
        return serialization.from_json(folder.data.read_bytes(), DataRecord)


@dataclass(frozen=True)
class DataHashes:
    """What the data of a run is now, and what is to be said of it. `changed`: since the run was begun, and accepted."""

    hashes: Mapping[str, str]
    changed: Sequence[str] = ()
    notes: Sequence[str] = ()

    def keep(self, folder: RunFolder, freeze: Callable[[Path], None] | None, notes: Sequence[str] = ()) -> None:
        """Into the run folder, with what preprocessing decided (`freeze` writes it; None: nothing) and the `notes` of
        the data's readers; what changed into the run log."""
        folder.freeze(freeze)
        record = DataRecord(self.hashes, tuple(notes))
        cache_dir.replace(folder.data, json.dumps(msgspec.to_builtins(record), indent=1))
        if self.changed:
            changed = list(self.changed)
            events.write(folder.events, "data", changed=changed, action="accepted, as faults.changed_data says")


def data_of(folder: RunFolder, recipe: Recipe, workload: Workload) -> DataHashes:
    """The run's data. Raises UserError where it is not what the run was begun with, unless the recipe accepts that:
    then the plan is made anew, as the batch may be another."""
    now = _hashes(recipe, workload)
    if not folder.exists():
        return DataHashes(now)
    record = read_record(folder)
    if record is None:
        return DataHashes(now, notes=[f"{folder.path} has no data hashes: the present data is accepted"])
    before = record.hashes
    if recipe.tasks:  # each has data of its own, and may have come since
        both = before.keys() & now.keys()
        changed = data_hash.differences({name: before[name] for name in both}, {name: now[name] for name in both})
    else:
        changed = data_hash.differences(before, now)
    if not changed:
        return DataHashes(now)
    first = changed[0]
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    if recipe.faults.changed_data == "refuse":
        raise UserError(
            f"{first}{more} since {folder.path} was begun.",
            why="a run that resumes on other data cannot be reproduced",
            do="bring the data back, --run FOLDER for a new run, or faults.changed_data=accept to go on with it",
        )
    folder.plan.unlink(missing_ok=True)
    return DataHashes(now, changed, [f"the data has changed since the run began: {first}{more}"])


def _hashes(recipe: Recipe, workload: Workload) -> Mapping[str, str]:
    """Of each file of the data."""
    from espalier.train import workload_registry

    return workload_registry.row(recipe).contents(runs.located(recipe), workload)


def refuse_changed(folder: RunFolder, recipe: Recipe, workload: Workload) -> None:
    """Raises UserError where the data is not what a run was trained on that has kept nothing of its preprocessing: its
    tokenizer and its classes would be derived from other data."""
    record = read_record(folder)
    now = _hashes(recipe, workload)
    changed = data_hash.differences(record.hashes, now) if record else []
    if changed:
        raise UserError(
            f"{changed[0]} since {folder.path} was begun, and the run does not keep what it made of its data.",
            why="its folder preprocessing is gone; tokens and classes would be those of other data",
            do="bring the data back",
        )


# --- what preprocessing decided, on hosts without the run's folder --------------------------------------------------

LIMIT = 64 << 20
"""Bytes that are sent. Above it (a large graph) hosts derive the same from the same data, and what they have is
compared."""

_PIECE = 1 << 20  # of a value in a store


def packed(run: Path) -> str:
    """What the run in `run` keeps, as text; empty where there is no such run, or it keeps nothing or more than `LIMIT`.
    Raises UserError where it is not as it was written."""
    folder = RunFolder(run)
    if not folder.exists() or (frozen := folder.kept()) is None:
        return ""
    files = [path for path in sorted(frozen.rglob("*")) if path.is_file()]
    if sum(path.stat().st_size for path in files) > LIMIT:
        return ""
    table = {str(path.relative_to(frozen)): path.read_bytes() for path in files}
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

    run = RunFolder(home)
    with writing(home):
        if run.kept() is None:
            home.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=home) as made:  # hosts may share a cache: who is first brings it, whole
                replace_folder(Path(made, "made"), fill)
                try:
                    Path(made, "made").rename(run.preprocessing)
                except OSError:
                    if not run.preprocessing.exists():
                        raise
    return run.kept()


def shared(store: Any, key: str, folder: Path | None, deadline: Deadline) -> Path | None:
    """What the run of the first rank keeps, in a folder of this host. `store`: a torch Store that all ranks reach;
    `folder`: the run's folder, on the first rank alone. Raises PeerLost where that rank has not said it by then."""
    if folder is not None:
        text = packed(folder)
        pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        for at, piece in enumerate(pieces):
            store.set(f"{key}/{at}", piece)
        store.set(key, str(len(pieces)))
        return RunFolder(folder).kept() if text else None
    count = deadline.poll(
        lambda: int(store.get(key)) if store.check([key]) else None,
        lambda: "what rank 0 keeps of the run",
        lambda: PeerLost("Rank 0 did not say what it keeps of the run.", why=deadline.waited, do="look at its log"),
    )
    return unpacked("".join(store.get(f"{key}/{at}").decode() for at in range(count)))
