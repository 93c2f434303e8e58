"""The manifest of a checkpoint: what belongs to it, how large it is, and its checksums. A checkpoint is good when its
manifest is, and every file in it has the size and XXH3-128 hash the manifest says."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import IO, Any

import msgspec
import xxhash

from espalier.checkpoint.run_identity import RunStamp
from espalier.recipe import serialization
from espalier.recipe.errors import DISTRIBUTION, UserError

VERSION = 3
"""1: skeletons are pickles. 2: they are plain values (`serialization`). 3: `run` names the run."""
NAME = "manifest.json"


class Bad(Exception):
    """A checkpoint that cannot be used, and why."""


class FileHash(msgspec.Struct, frozen=True):
    """One file: its bytes and its XXH3-128 in hex."""

    bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one checkpoint is. `run` names the run that wrote it, from format 3 on; `seal` is the hash of the rest."""

    version: int = VERSION
    step: int
    loss: float | None
    ranks: int
    time: float
    meta: dict[str, Any]
    files: dict[str, FileHash]
    run: RunStamp | msgspec.UnsetType = msgspec.UNSET
    seal: str = ""

    @property
    def stamp(self) -> RunStamp | None:
        """Which run wrote it; None where it does not say that."""
        return self.run if isinstance(self.run, RunStamp) else None

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def dumps(manifest: Manifest) -> bytes:
    """The manifest as indented JSON, sealed. Raises UserError when `meta` holds what JSON has not."""
    try:
        sealed = msgspec.structs.replace(manifest, seal=_seal(manifest))
        return msgspec.json.format(msgspec.json.encode(sealed), indent=2) + b"\n"
    except TypeError as error:
        raise UserError(
            f"The checkpoint's meta of step {manifest.step} cannot be written as JSON.",
            why=str(error),
            do="put tensors and objects in a part's state_dict",
        ) from None


def loads(text: bytes) -> Manifest:
    """The manifest in `text`. Raises Bad when it is damaged, UserError when it is of a later format."""
    try:
        manifest: Manifest = serialization.from_json(text, Manifest)
    except msgspec.DecodeError as error:
        raise Bad(f"{NAME} is damaged ({error})") from None
    if manifest.version > VERSION:
        raise UserError(
            f"The checkpoint of step {manifest.step} has format {manifest.version}.",
            why=f"this program reads formats up to {VERSION}",
            do=f"pip install --upgrade {DISTRIBUTION}",
        )
    if manifest.seal != _seal(manifest):
        raise Bad(f"{NAME} is damaged (its seal does not match)")
    for file in manifest.files:
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise Bad(f"{NAME} names {file!r}, which is no file of the checkpoint")
    return manifest


def digest(file: IO[bytes]) -> FileHash:
    """Size and hash of an open file, read to its end."""
    state = xxhash.xxh3_128()
    count = 0
    while block := file.read(1 << 22):
        state.update(block)
        count += len(block)
    return FileHash(count, state.hexdigest())


def digest_path(path: Path) -> FileHash:
    """Size and hash of the file at `path`."""
    with path.open("rb") as file:
        return digest(file)


def _seal(manifest: Manifest) -> str:
    body = msgspec.json.encode(msgspec.structs.replace(manifest, seal=""), order="deterministic")
    return xxhash.xxh3_128_hexdigest(body)
