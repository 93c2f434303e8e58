"""Which runs a user began here. Opening one runs the code that its recipe names; opening another's does not.

A run's first event has a seal: a keyed hash of what runs code in its recipe, of the folder where that is looked for,
and of the code that the run keeps. The key is the user's, in the cache folder.
"""

from __future__ import annotations

import hmac
import json
import secrets
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from espalier.recipe import Recipe, cache_dir, data_hash
from espalier.recipe.cache_dir import cache_folder, hashed
from espalier.recipe.errors import UserError
from espalier.recipe.import_function import KEPT_CODE
from espalier.train.run_folder import located

_KEY_BYTES = 32


class Origin(NamedTuple):
    """Where the code of a run is looked for: in `folder`, and before it in what the run keeps in `kept`. `reads`:
    whether its data is read, which may be a pickle."""

    folder: Path | None
    kept: Path | None = None
    reads: bool = True

    def told(self) -> list[str | None]:
        """The folder, and the hash of the code that is kept."""
        found = [] if self.kept is None else [hashed(data_hash.in_folder(self.kept / KEPT_CODE))]
        return [None if self.folder is None else str(self.folder), *found]


def seal(recipe: Recipe, origin: Origin) -> str:
    """Of a run that begins: what it runs and from where; empty where it names no code, or the key cannot be kept."""
    code = _code(recipe)
    return signed([code, *origin.told()]) if code else ""


def signed(content: object) -> str:
    """A keyed hash of plain values, which this user alone can make; empty where the key cannot be kept."""
    try:
        key = _key()
    except OSError:
        return ""
    return hmac.new(key, json.dumps(content).encode(), sha256).hexdigest()


def is_signed(content: object, seal: str) -> bool:
    """Whether `seal` is what `signed` gives this user for `content`."""
    return bool(seal) and hmac.compare_digest(seal.encode(), signed(content).encode())


def check(recipe: Recipe, origin: Origin, sealed: str, run: str, trust: bool) -> None:
    """Raises UserError where opening the run in `run` would run code and neither did this user begin it nor is it
    trusted. `origin.folder`, `sealed`: as its first event has them."""
    code = _code(recipe, origin.reads)
    if not code or trust or (sealed and hmac.compare_digest(sealed.encode(), seal(recipe, origin).encode())):
        return
    place = origin.kept / KEPT_CODE if origin.kept else origin.folder
    says = ", ".join(f"{key} = {value!r}" for key, value in code.items())
    raise UserError(
        f"The run in {run} was not begun by you on this machine, and opening it runs code.",
        why=f"its recipe says {says}; looked for in {place}",
        do=f"read that code; if you trust who wrote it, add --trust (Python: espalier.open({run!r}).model(trust=True))",
    )


def _code(recipe: Recipe, reads: bool = True) -> dict[str, str | bool]:
    """The options that run code, by key. `reads`: the data is read."""
    found: dict[str, str | bool] = {}
    if (build := getattr(recipe.model, "build", None)) is not None:
        found["model.build"] = build
    if reads and recipe.graph is not None and recipe.graph.pickle:
        paths = [one.path for one in located(recipe).data]
        found |= {"graph.pickle": True, "data.path": ", ".join(paths)}
    return found


def _key() -> bytes:
    """The user's key, made once. Nobody else can read it."""
    path = cache_folder() / "key"
    path.parent.mkdir(parents=True, exist_ok=True)
    key = cache_dir.claim(path, secrets.token_bytes(_KEY_BYTES), 0o600)
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} holds no key")
    return key
