"""Checkpoint owner: gives a run its identity when it starts, and refuses places that hold another run's checkpoints."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from espalier import cache_dir
from espalier.checkpoint import run_identity
from espalier.checkpoint.run_identity import RunIdentity, RunStamp
from espalier.checkpoint.save_and_restore import CheckpointInfo, Checkpoints
from espalier.config import Recipe, recipe_file
from espalier.run import RunFolder
from espalier.verbs import run_places


def meaning(recipe: Recipe, data: str) -> str:
    """A digest of what a run means. `data`: its fingerprint, which stands for the paths."""
    options = {key: value for key, value in recipe_file.meaning(recipe).items() if not _is_data_path(key)}
    return cache_dir.hashed([options, data])


def _is_data_path(key: str) -> bool:
    section, _, option = key.partition(".")
    return section == "data" and option.endswith("path")


@dataclass(frozen=True)
class Owner:
    """The identity of a run that starts, and what is to be said of it."""

    identity: RunIdentity
    saved: Checkpoints
    notes: Sequence[str] = ()
    new: bool = False
    """Whether it was drawn now."""

    def keep(self, folder: RunFolder, recipe: Recipe) -> None:
        """Writes the identity into the run folder, and beside checkpoints that are elsewhere. Raises UserError where
        another run was first there."""
        identity = self.identity
        if recipe.checkpoint.target is not None:
            path = self.saved.place.path(run_identity.OWNER)
            content = self.saved.place.claim(msgspec.json.encode(identity.run))
            first = run_identity.loads(content, RunStamp, path)
            if self.new and first.meaning == identity.run.meaning:
                identity = run_identity.taken_up(first)
            run_identity.refuse_foreign(identity, first, path)
        sealed = msgspec.structs.replace(identity, seal=run_places.seal(recipe))
        cache_dir.replace(folder.identity, msgspec.json.format(msgspec.json.encode(sealed)).decode())


def of_start(folder: RunFolder, recipe: Recipe, data: str, saved: Checkpoints) -> Owner:
    """Who the checkpoints of a run belong to that starts or goes on; `data`: the fingerprint of its data.

    A run without a folder that means the same as the run of the newest checkpoint goes on as that one: its folder was
    lost, and its checkpoints are elsewhere. Raises UserError where a checkpoint is of another run.
    """
    owner, entries = _owner(folder, meaning(recipe, data), saved)
    for entry in entries:
        run_identity.refuse_foreign(owner.identity, entry.run, entry.path)
    nameless = [entry.path for entry in entries if entry.run is None and not entry.why][-1:]
    return replace(owner, notes=[*owner.notes, *(run_identity.doubt(owner.identity, None, path) for path in nameless)])


def _owner(folder: RunFolder, digest: str, saved: Checkpoints) -> tuple[Owner, list[CheckpointInfo]]:
    entries, before = saved.entries(), run_identity.read(folder.path)
    if before is not None:
        return Owner(before.now_means(digest), saved), entries
    stamp = next((entry.run for entry in reversed(entries) if entry.run is not None), None)
    if stamp is None or stamp.meaning != digest:
        return Owner(run_identity.new(folder.path.name, socket.gethostname(), digest), saved, new=True), entries
    note = f"{entries[-1].path} is of {stamp}, with the same recipe, seed and data: the run goes on as that one"
    return Owner(run_identity.taken_up(stamp), saved, [note]), entries
