"""What a run may do to whoever opens it: run the code that its recipe names, and use places outside its folder.

Whoever begins a run seals both with a key of their own, in the cache folder: its first event has a keyed hash of what
runs code in its recipe, of the folder where that is looked for and of the code that the run keeps; `run.json` one of
what the recipe has written, reached or started elsewhere. Opening a run whose seals do not match runs no code and uses
none of these places: what is derived of the data goes into this user's own cache, checkpoints are those in the run
folder. Checkpoints in another folder of this machine are read, as nothing is written there.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import sys
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from espalier.checkpoint import run_identity
from espalier.recipe import Launch, Recipe, cache_dir, data_hash, recipe_file, terminal
from espalier.recipe.cache_dir import cache_folder, hashed, is_url
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import printable
from espalier.recipe.import_function import KEPT_CODE
from espalier.train.run_folder import RunFolder, located

TARGET = "checkpoint.target"
_HUB = "hf:"
_PLACE = re.compile(r"(checkpoint\.target|data\.\d+\.(cache|path)|store\.path|track\.to|launch\.(command|python))$")
_DATA = re.compile(r"data\.\d+\.path$")
_FOREIGN = "the run was not begun by you on this machine (or an earlier version began it)"
_KEY_BYTES = 32


class Origin(NamedTuple):
    """Where the code of a run is looked for: in `folder`, and before it in the folder `frozen`. `reads`: whether its
    data is read, which may be a pickle."""

    folder: Path | None
    frozen: Path | None = None
    reads: bool = True

    def signed_part(self) -> list[str | None]:
        """The folder, and the hash of the code that is kept."""
        hashes = [] if self.frozen is None else [hashed(data_hash.in_folder(self.frozen / KEPT_CODE))]
        return [None if self.folder is None else str(self.folder), *hashes]


def seal_code(recipe: Recipe, origin: Origin) -> str:
    """Of a run that begins: what it runs and from where; empty where it names no code, or the key cannot be kept."""
    code = _code(recipe)
    return signed([code, *origin.signed_part()]) if code else ""


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


def refuse_code(recipe: Recipe, origin: Origin, sealed: str, run: str, trust: bool) -> None:
    """Raises UserError where opening the run in `run` would run code and neither did this user begin it nor is it
    trusted. `origin.folder`, `sealed`: as its first event has them."""
    code = _code(recipe, origin.reads)
    if not code or trust or is_signed([_code(recipe), *origin.signed_part()], sealed):
        return
    place = origin.frozen / KEPT_CODE if origin.frozen else origin.folder
    says = ", ".join(f"{key} = {value!r}" for key, value in code.items())
    raise UserError(
        f"The run in {run} was not begun by you on this machine, and opening it runs code.",
        why=f"its recipe says {says}; looked for in {place}",
        do=f"read that code; if you trust who wrote it, add --trust (Python: espalier.open({run!r}).model(trust=True))",
    )


def _code(recipe: Recipe, reads: bool = True) -> dict[str, str | bool]:
    """The options that run code, by key. `reads`: the data is read."""
    options = {}
    if (build := getattr(recipe.model, "build", None)) is not None:
        options["model.build"] = build
    if reads and recipe.graph is not None and recipe.graph.pickle:
        paths = [source.path for source in located(recipe).data]
        options |= {"graph.pickle": True, "data.path": ", ".join(paths)}
    return options


def _key() -> bytes:
    """The user's key, made once. Nobody else can read it."""
    path = cache_folder() / "key"
    path.parent.mkdir(parents=True, exist_ok=True)
    key = cache_dir.claim(path, secrets.token_bytes(_KEY_BYTES), 0o600)
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} holds no key")
    return key


# --- places outside the run folder ------------------------------------------------------------------------------------


def named_places(recipe: Recipe) -> dict[str, str]:
    """The options of `recipe` that are places, where they are not the default, by key."""
    leaves = recipe_file.leaves(recipe_file.to_table(located(recipe)))
    texts = {key: value if isinstance(value, str) else ", ".join(value) for key, value in leaves if _PLACE.match(key)}
    usual = ("", Launch().command)
    return {
        key: text
        for key, text in texts.items()
        if text not in usual and (text.startswith(_HUB) or _DATA.match(key) is None)
    }


def _without(recipe: Recipe, keys: Collection[str]) -> Recipe:
    """`recipe` with the places named by `keys` as they are by default."""
    table = recipe_file.to_table(recipe)
    for key in keys:
        *path, option = key.split(".")
        section: Any = table
        for name in path:
            section = section[int(name) if isinstance(section, list) else name]
        del section[option]
    return recipe_file.from_table(table)


def seal_places(recipe: Recipe) -> str:
    """Of the places of a run that this user begins; empty where it names none, or the key cannot be kept, which is
    said."""
    places = named_places(recipe)
    signature = signed(places) if places else ""
    if places and not signature:
        note = f"note: the key in {cache_folder()} cannot be kept: opening this run will ask for --trust, also of you"
        terminal.say(note, file=sys.stderr, flush=True)
    return signature


def _is_sealed(folder: RunFolder) -> bool:
    """Whether this user has begun the run in `folder`, with the places that its recipe names."""
    places = named_places(folder.read())
    identity = run_identity.read(folder.path)
    return not places or (identity is not None and is_signed(places, identity.seal))


class Use(NamedTuple):
    """A recipe with the places that may be used, and what is to be said of the others."""

    recipe: Recipe
    note: str = ""

    def announced(self) -> Recipe:
        """The recipe, once the note is on standard error."""
        if self.note:
            terminal.say(f"note: {self.note}", file=sys.stderr, flush=True)
        return self.recipe


def usable(folder: RunFolder, recipe: Recipe, trust: bool, own_keys: Collection[str] = (), writes: bool = False) -> Use:
    """`recipe`, of the run in `folder`, with the places that may be used. The one function that decides it.

    Args:
        trust: whoever made the run is trusted (`--trust`).
        own_keys: keys that this user gave on the command line.
        writes: the run is to go on; else its model and its data are read.

    Raises UserError where the checkpoints are in a place that may not be used, and none are in the folder.
    """
    named = named_places(recipe).items()
    places = {key: value for key, value in named if key not in own_keys and not value.startswith(_HUB)}
    if not writes:
        # Checkpoints in another folder are read, and nothing is written.
        places = {
            key: value
            for key, value in places.items()
            if key.startswith(("data.", "store.")) or (key == TARGET and is_url(value))
        }
    if not places or _is_sealed(folder):
        return Use(recipe)
    listed = ", ".join(f"{_short(key)} = {printable(value)!r}" for key, value in places.items())
    if trust:
        return Use(recipe, f"used, as --trust says, though {_FOREIGN}: {listed}")
    if TARGET in places and not any(folder.checkpoints.glob("step-*")):
        raise UserError(
            f"The checkpoints of {folder.path} are at {printable(places[TARGET])}, where nothing is read or written.",
            why=f"{_FOREIGN}, and its recipe names that place",
            do=f"--trust if you trust who made the run, or copy its checkpoints to {folder.checkpoints}",
        )
    return Use(_without(recipe, places), f"not used without --trust, as {_FOREIGN}: {listed}")


def _short(key: str) -> str:
    """As people write it: the first of several data sources needs no number."""
    return key.replace("data.0.", "data.")


def refuse_hub(folder: RunFolder, recipe: Recipe, trust: bool) -> None:
    """Raises UserError where reading the run's data would ask a server that somebody else's recipe names."""
    hub = [source.path for source in recipe.data if source.path.startswith(_HUB)]
    if hub and not trust and not _is_sealed(folder):
        raise UserError(
            f"The data of {folder.path} is {printable(hub[0])}, and is not fetched.",
            why=_FOREIGN,
            do="--trust if you trust who made the run, or name other data (--data PATH, data.path=PATH)",
        )


def load(path: str | Path, overrides: Sequence[str], trust: bool) -> Recipe:
    """The recipe in file `path` with `overrides`; of a run folder's `run.toml` with the places that may be used."""
    recipe = recipe_file.load(path, overrides)
    folder = _run_of(path)
    if folder is None:
        return recipe
    before = named_places(folder.read())
    places = named_places(recipe)
    given = {text.partition("=")[0].strip() for text in overrides}
    typed = {key for key, value in places.items() if {key, _short(key)} & given or before.get(key) != value}
    if any(value.startswith(_HUB) and key not in typed for key, value in places.items()):
        refuse_hub(folder, recipe, trust)
    return usable(folder, recipe, trust, typed, writes=True).announced()


def text(path: str | Path, trust: bool) -> str:
    """The recipe file `path`, as it is for another machine; of a run folder's `run.toml` with the places that may be
    used."""
    folder = _run_of(path)
    if folder is None:
        return Path(path).read_text(encoding="utf-8")
    return recipe_file.dump(usable(folder, folder.read(), trust, writes=True).recipe)


def _run_of(path: str | Path) -> RunFolder | None:
    """The run whose `run.toml` is at `path`."""
    file = Path(path)
    folder = RunFolder(Path(path).parent)
    of_run = file.name == folder.recipe.name and (folder.events.exists() or folder.plan.exists())
    return folder if of_run else None
