"""Forks: the newest good checkpoint of one run as the first one of another."""

from __future__ import annotations

import shutil

import msgspec

from espalier.checkpoint import manifest
from espalier.checkpoint.run_identity import RunStamp
from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.checkpoint.storage import read_manifest
from espalier.recipe.errors import UserError


def copy_newest(source: Checkpoints, target: Checkpoints, run: RunStamp) -> int:
    """Copies the newest checkpoint of `source` whose files are as they were written to `target`, as one of `run`.
    Returns its step. Raises UserError where none is good, or it is of another run than `source` is."""
    reasons = []
    for entry in reversed(source.entries()):
        try:
            return _copied(source, target, run, entry.path.rstrip("/").rpartition("/")[2])
        except manifest.Bad as bad:
            reasons.append(f"{entry.path}: {bad}")
    why = "; ".join(reasons) or "there is none"
    raise UserError(f"No checkpoint at {source.place.path('')} can be used.", why=why, do="let that run train longer")


def _copied(source: Checkpoints, target: Checkpoints, run: RunStamp, name: str) -> int:
    """Raises manifest.Bad where a file is damaged or gone."""
    content = read_manifest(source.place, name)
    unfinished = target.place.begin(name)
    source.refuse_foreign(name, content)
    try:
        for file, written in content.files.items():
            (unfinished / file).parent.mkdir(parents=True, exist_ok=True)
            with source.place.open(name, file) as reader, (unfinished / file).open("wb") as writer:
                shutil.copyfileobj(reader, writer, 1 << 22)
            if manifest.digest_path(unfinished / file) != written:
                raise manifest.Bad(f"{file} is damaged (its checksum does not match)")
        target.place.publish(name, list(content.files))
        target.place.commit(name, msgspec.structs.replace(content, run=run))
    except FileNotFoundError as error:
        raise manifest.Bad(f"a file is missing ({error})") from None
    finally:
        target.place.abandon(name)
    return content.step
