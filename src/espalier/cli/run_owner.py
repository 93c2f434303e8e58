"""Run owner: which run it is that starts or goes on, and which checkpoints are its own.

Below `checkpoint.target` each run has a folder of its own. A folder that an earlier version filled, with the
checkpoints of one run alone, stays that run's.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from espalier.checkpoint import forks, run_identity
from espalier.checkpoint.run_identity import RunIdentity, RunStamp
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.storage import Folder, open_place
from espalier.cli import run_trust
from espalier.recipe import Recipe, cache_dir, data_hash, import_function, recipe_file
from espalier.train import phases
from espalier.train.run_folder import RunFolder


def meaning(recipe: Recipe, data: str) -> str:
    """A digest of what a run means: its options, its data and its code. `data`: its fingerprint, which stands for the
    paths."""
    options = recipe_file.meaning(recipe)
    paths = [key for key in options if key.startswith("data.") and key.endswith(".path")]
    content: list[object] = [{key: options[key] for key in options.keys() - {*paths}}, data]
    if (build := getattr(recipe.model, "build", None)) is not None:
        content.append(data_hash.hashes({str(name): path for name, path in import_function.sources(build).items()}))
    return cache_dir.hashed(content)


@dataclass(frozen=True)
class Owner:
    """The identity of a run that starts, and what is to be said of it.

    Attributes:
        recipe: with the run's own folder as `checkpoint.target`, where it has one; saved: its checkpoints.
    """

    identity: RunIdentity
    recipe: Recipe
    saved: Checkpoints
    notes: Sequence[str] = ()

    def keep(self, folder: RunFolder) -> None:
        """Writes the identity into the run folder, and beside checkpoints that are elsewhere, and locks their
        folder. Raises UserError where another run was first there, or another process writes there."""
        identity = self.identity
        if self.recipe.checkpoint.target is not None:
            path = self.saved.place.path(run_identity.OWNER)
            content = self.saved.place.claim(msgspec.json.encode(identity.run))
            first = run_identity.loads(content, RunStamp, path)
            run_identity.refuse_foreign(identity, first, path)
            if isinstance(self.saved.place, Folder) and self.saved.place.root != folder.path.absolute():
                folder.lock(self.saved.place.root, "checkpoint.target", "name another checkpoint.target")
        sealed = msgspec.structs.replace(identity, seal=run_trust.seal_places(self.recipe))
        cache_dir.replace(folder.identity, msgspec.json.format(msgspec.json.encode(sealed)).decode())


def owner_of(folder: RunFolder, recipe: Recipe, data: str) -> Owner:
    """Who the checkpoints of a run belong to that starts or goes on; `data`: the fingerprint of its data.

    A run without a folder that means the same as the run of the newest checkpoint goes on as that one: its folder was
    lost, and its checkpoints are elsewhere. Raises UserError where a checkpoint is of another run.
    """
    digest = meaning(recipe, data)
    before = run_identity.read(folder.path)
    saved = phases.checkpoints(recipe, folder)
    target = recipe.checkpoint.target
    entries = saved.entries()
    identity = before.now_means(digest) if before is not None else None
    stamps = [entry.run for entry in entries if entry.run is not None]
    if before is None and stamps and stamps[-1].meaning == digest:  # the newest checkpoint's run means the same
        identity = run_identity.taken_up(*stamps)
    if target is not None and not entries:
        identity = identity or _lost(target, folder.path.name, digest)
    notes = list[str]()
    goes_on = before is None and identity is not None
    identity = identity or run_identity.new(folder.path.name, socket.gethostname(), digest)
    if target is not None and not entries:
        recipe = recipe.changed(checkpoint=recipe.checkpoint.changed(target=_own_folder(target, identity)))
        saved = phases.checkpoints(recipe, folder)
        entries = saved.entries()
        if not entries and identity.forked is not None:
            forks.copy_newest(Checkpoints(folder.checkpoints), saved, identity.run)
            entries = saved.entries()
    saved.run = identity
    if goes_on:
        place = entries[-1].path if entries else saved.place.path("")
        notes.append(f"{place} is of {identity.run}, with the same recipe, seed and data: the run goes on as that one")
    for entry in entries:
        run_identity.refuse_foreign(identity, entry.run, entry.path)
    nameless = [entry.path for entry in entries if entry.run is None and not entry.why][-1:]
    notes += [run_identity.doubt(identity, None, path) for path in nameless]
    return Owner(identity, recipe, saved, notes)


def _lost(target: str, name: str, digest: str) -> RunIdentity | None:
    """The newest run of that name and meaning that has a folder below `target`."""
    stamps = []
    for folder in open_place(target).owned_folders(f"{recipe_file.plain_name(name)}-"):
        place = open_place(f"{target}/{folder}")
        stamp = run_identity.loads(place.owner() or b"", RunStamp, place.path(run_identity.OWNER))
        if (stamp.folder, stamp.name, stamp.meaning) == (folder, name, digest):
            stamps.append(stamp)
    return run_identity.taken_up(max(stamps, key=lambda stamp: stamp.begun)) if stamps else None


def _own_folder(target: str, identity: RunIdentity) -> str:
    """The folder of this run: `target` itself where that is named so, or an earlier version of this run has it."""
    place = open_place(target)
    content = place.owner()
    owner = None if content is None else run_identity.loads(content, RunStamp, place.path(run_identity.OWNER))
    run_identity.refuse_foreign(identity, owner, place.path(run_identity.OWNER))
    folder = identity.run.folder
    return target if owner is not None or target.rstrip("/").endswith(f"/{folder}") else f"{target}/{folder}"
