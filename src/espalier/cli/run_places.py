"""Places of a run: what its recipe has written, reached or started outside the run folder.

A run that this user begins has a seal of these options in `run.json`, made with the key of `run_seal`. Opening a run
whose seal does not match uses none of them: what is derived of the data goes into this user's own cache, checkpoints
are those in the run folder. Checkpoints in another folder of this machine are read, as nothing is written there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from espalier.checkpoint import run_identity
from espalier.cli import run_seal
from espalier.recipe import Launch, Recipe, recipe_file, terminal
from espalier.recipe.cache_dir import cache_folder, is_url
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import printable
from espalier.train.run_folder import RunFolder, located

TARGET = "checkpoint.target"
_HUB = "hf:"
_PLACE = re.compile(r"(checkpoint\.target|data\.\d+\.(cache|path)|store\.path|track\.to|launch\.(command|python))$")
_DATA = re.compile(r"data\.\d+\.path$")
_FOREIGN = "the run was not begun by you on this machine (or an earlier version began it)"


def named(recipe: Recipe) -> dict[str, str]:
    """The options of `recipe` that are places, where they are not the default, by key."""
    leaves = recipe_file.leaves(recipe_file.to_table(located(recipe)))
    texts = {key: value if isinstance(value, str) else ", ".join(value) for key, value in leaves if _PLACE.match(key)}
    usual = ("", Launch().command)
    return {
        key: text for key, text in texts.items() if text not in usual and (_is_hub(text) or _DATA.match(key) is None)
    }


def _is_hub(path: str) -> bool:
    return path.startswith(_HUB)


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


def seal(recipe: Recipe) -> str:
    """Of the places of a run that this user begins; empty where it names none, or the key cannot be kept, which is
    said."""
    places = named(recipe)
    signature = run_seal.signed(places) if places else ""
    if places and not signature:
        note = f"note: the key in {cache_folder()} cannot be kept: opening this run will ask for --trust, also of you"
        terminal.say(note, file=sys.stderr, flush=True)
    return signature


def _is_sealed(folder: RunFolder) -> bool:
    """Whether this user has begun the run in `folder`, with the places that its recipe names."""
    places, identity = named(folder.read()), run_identity.read(folder.path)
    return not places or (identity is not None and run_seal.is_signed(places, identity.seal))


class Use(NamedTuple):
    """A recipe with the places that may be used, and what is to be said of the others."""

    recipe: Recipe
    note: str = ""

    def said(self) -> Recipe:
        """The recipe, once the note is on standard error."""
        if self.note:
            terminal.say(f"note: {self.note}", file=sys.stderr, flush=True)
        return self.recipe


def usable(folder: RunFolder, recipe: Recipe, trust: bool, own: Collection[str] = (), writes: bool = False) -> Use:
    """`recipe`, of the run in `folder`, with the places that may be used. The one function that decides it.

    Args:
        trust: whoever made the run is trusted (`--trust`).
        own: keys that this user gave on the command line.
        writes: the run is to go on; else its model and its data are read.

    Raises UserError where the checkpoints are in a place that may not be used, and none are in the folder.
    """
    places = {key: value for key, value in named(recipe).items() if key not in own and not _is_hub(value)}
    if not writes:
        places = {key: value for key, value in places.items() if _is_opened(key, value)}
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


def _is_opened(key: str, value: str) -> bool:
    """Whether a place has a part in reading a run. Checkpoints in another folder are read, and nothing is written."""
    return key.startswith(("data.", "store.")) or (key == TARGET and is_url(value))


def refuse_hub(folder: RunFolder, recipe: Recipe, trust: bool) -> None:
    """Raises UserError where reading the run's data would ask a server that somebody else's recipe names."""
    hub = [source.path for source in recipe.data if _is_hub(source.path)]
    if hub and not trust and not _is_sealed(folder):
        raise UserError(
            f"The data of {folder.path} is {printable(hub[0])}, and is not fetched.",
            why=_FOREIGN,
            do="--trust if you trust who made the run, or name other data (--data PATH, data.path=PATH)",
        )


def load(path: str | Path, overrides: Sequence[str], trust: bool) -> Recipe:
    """The recipe in file `path` with `overrides`; of a run folder's `run.toml` with the places that may be used."""
    recipe, file = recipe_file.load(path, overrides), Path(path)
    folder = RunFolder(file.parent)
    of_run = file.name == folder.recipe.name and (folder.events.exists() or folder.plan.exists())
    if not of_run:
        return recipe
    before = named(folder.read())
    given = {text.partition("=")[0].strip() for text in overrides}
    own = {key for key, value in named(recipe).items() if {key, _short(key)} & given or before.get(key) != value}
    if any(_is_hub(value) and key not in own for key, value in named(recipe).items()):
        refuse_hub(folder, recipe, trust)
    return usable(folder, recipe, trust, own, writes=True).said()
