"""Run identity: which run a checkpoint belongs to. Imports no torch.

A run draws a random id when it first starts. The id, the host and the time of that start, and digests of what the run
means (recipe, seed, data, code) are in `run.json` of the run folder and travel with it. Every checkpoint's manifest,
export and `run` event has them as a `RunStamp`; weights and their files do not, so that equal runs have equal bytes.
Below `checkpoint.target` each run has a folder of its own, `NAME-ID`.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from espalier.recipe import serialization
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing, printable
from espalier.recipe.recipe_file import plain_name

Kind = TypeVar("Kind")

NAME = "run.json"
"""In the run folder."""
EXPORT = "export.json"
"""In the folder of an export: the stamp of its run, and the step."""
OWNER = "owner.json"
"""In the place that `checkpoint.target` names: the stamp of the run whose checkpoints it holds."""
_ID_BYTES = 6
_LONGEST = 60
"""Characters of a name in a message."""


class RunStamp(msgspec.Struct, frozen=True):
    """Names a run.

    Attributes:
        id: drawn at its first start.
        name: of its folder then; host: of that start; begun: its time (unix seconds).
        meaning: digest of what the run meant when this was stamped.
    """

    id: str
    name: str
    host: str
    begun: float
    meaning: str

    def __str__(self) -> str:
        try:
            begun = datetime.fromtimestamp(self.begun, UTC).strftime("%Y-%m-%d %H:%M UTC")
        except (ValueError, OverflowError, OSError):  # no time of this world
            begun = str(self.begun)
        name, drawn, host = (printable(text, _LONGEST) for text in (self.name, self.id, self.host))
        return f"run {name} ({drawn}) of host {host}, begun on {begun}"

    @property
    def folder(self) -> str:
        """The name of its folder below `checkpoint.target`."""
        return f"{plain_name(self.name)}-{plain_name(self.id)}"


class Fork(msgspec.Struct, frozen=True):
    """Where a run was forked from another one (`train --from`): that run, and the step of its checkpoint."""

    run: RunStamp
    step: int


class RunIdentity(msgspec.Struct, frozen=True):
    """What `run.json` holds.

    Attributes:
        run: the stamp of what is saved from now on.
        meanings: those that the run ever had, `run.meaning` among them: tasks may come and go, data may be accepted.
        seal: see `cli.run_trust`.
        forked: of a run that goes on from another one's checkpoint.
    """

    run: RunStamp
    meanings: tuple[str, ...]
    seal: str = ""
    forked: Fork | None = None

    def now_means(self, digest: str) -> RunIdentity:
        """The same run, which now means this."""
        meanings = (*(known for known in self.meanings if known != digest), digest)
        return msgspec.structs.replace(self, run=msgspec.structs.replace(self.run, meaning=digest), meanings=meanings)


def new(name: str, host: str, meaning: str) -> RunIdentity:
    """The identity of a run that begins now."""
    stamp = RunStamp(secrets.token_hex(_ID_BYTES), printable(name), host, time.time(), meaning)
    return RunIdentity(stamp, (meaning,))


def taken_up(*stamps: RunStamp) -> RunIdentity:
    """The identity of the run that the last of these checkpoints is of, whose folder was lost."""
    run = stamps[-1]
    return RunIdentity(run, tuple(dict.fromkeys(stamp.meaning for stamp in stamps if stamp.id == run.id)))


def read(folder: Path) -> RunIdentity | None:
    """The identity of the run in `folder`; None where an earlier version began it. Raises UserError for a damaged
    one."""
    try:
        text = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return None
    return loads(text, RunIdentity, str(folder / NAME))


def loads(text: bytes, kind: type[Kind], path: str) -> Kind:
    """What a `run.json` or `owner.json` holds. Raises UserError, which names its `path`."""
    with parsing(path, "restore it from a copy of the run, or remove it"):
        content: Kind = serialization.from_json(text, kind)
        return content


def is_foreign(identity: RunIdentity | None, stamp: RunStamp | None) -> bool:
    """Whether what is stamped so is of another run than `identity`; what has no identity is not."""
    if identity is None or stamp is None:
        return False
    return stamp.id != identity.run.id or stamp.meaning not in identity.meanings


def refuse_foreign(identity: RunIdentity | None, stamp: RunStamp | None, path: str) -> None:
    """Raises UserError where a checkpoint, or a place of checkpoints, at `path` is of another run than `identity`."""
    if is_foreign(identity, stamp):
        raise UserError(
            f"{path} belongs to {stamp}: another run than this one.",
            do="espalier train --from the folder of that run if you mean to continue it; else move it away, or name "
            "another checkpoint.target or --run",
        )


def doubt(identity: RunIdentity | None, stamp: RunStamp | None, path: str) -> str:
    """What is to be said of a checkpoint at `path` that is used though it, or the run, has no identity; else empty."""
    if identity is not None and stamp is None:
        return f"{path} does not say which run it is of (an earlier version wrote it): it is taken for this run's"
    if identity is None and stamp is not None:
        return f"the run folder has no {NAME}; {path} is of {stamp}"
    return ""
