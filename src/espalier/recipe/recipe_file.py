"""Recipe file: reads TOML, then `key=value` overrides, into the structs of `config`, and writes it; compares two."""

from __future__ import annotations

import itertools
import math
import tomllib
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from espalier import recipe as config
from espalier.recipe import mechanism_options, model_kinds, recipe_errors
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import decoded, parsing

Table = dict[str, Any]

LONGEST_NAME = 200
"""Bytes of a run's name: file systems take 255, and some files bear it with an ending."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> config.Recipe:
    """The recipe in file `path` with `key=value` overrides applied. Raises UserError, never anything else."""
    file = Path(path)
    table = _read(file)
    table.setdefault("name", plain_name(file.stem))
    return _recipe(table, str(path), _overridden(table, overrides))


def plain_name(text: str) -> str:
    """The name nearest to `text` that a run can have: it stands in paths, scripts, pages and on terminals."""
    allowed = "".join(
        letter if unicodedata.category(letter)[0] in "LMN" or letter in "-_. " else "-" for letter in text
    )
    return allowed.encode()[:LONGEST_NAME].decode(errors="ignore").lstrip("-. ").rstrip(" ") or "run"


def from_table(table: Table, origin: str = "recipe", overrides: Sequence[str] = ()) -> config.Recipe:
    """The recipe a TOML table says, with `key=value` overrides; `origin` names the table in messages."""
    return _recipe(table, origin, _overridden(table, overrides))


def _recipe(table: Table, origin: str, overridden: Sequence[str]) -> config.Recipe:
    _refuse_odd_values(table, origin)
    table = _normalise(table)
    try:
        return mechanism_options.convert(table, config.Recipe)
    except msgspec.ValidationError as error:
        invalid = error
    recipe_errors.refuse_unknown(table, config.Recipe, origin)  # says more of a key that nothing has
    raise recipe_errors.invalid(invalid, table, origin, overridden)


def to_table(recipe: config.Recipe) -> Table:
    """The recipe as a plain table without the keys that are None, as TOML has no null."""
    return without_none(mechanism_options.to_builtins(recipe))


def without_none(value: Any) -> Any:
    """A plain value without the keys that are None, in it and in all it holds."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value


def dump(recipe: config.Recipe) -> str:
    """The recipe as TOML text; `load` of it gives the same recipe. Raises UserError for a path that is not UTF-8."""
    table = to_table(recipe)
    _refuse_odd_values(table, "The recipe")
    return tomli_w.dumps(table)


def changed(before: config.Recipe, after: config.Recipe) -> list[tuple[str, Any, Any]]:
    """The keys whose change alters the meaning of a run, as (key, before, after)."""
    left, right = meaning(before), meaning(after)
    keys = sorted({*left, *right})
    return [(key, left.get(key), right.get(key)) for key in keys if not _same(left.get(key), right.get(key))]


def meaning(recipe: config.Recipe) -> dict[str, Any]:
    """The options that say what a run means, by key: without those that say how it is carried out."""
    resumable = tuple(f"{free}." for free in config.RESUMABLE)
    return {
        key: value
        for key, value in leaves(to_table(recipe))
        if not f"{key}.".startswith(resumable) and not (key.startswith("data.") and key.endswith(".cache"))
    }


# --- reading -----------------------------------------------------------------------------------------------------


def _read(file: Path) -> Table:
    if file.is_dir():
        inside = file / "run.toml"
        do = f"{inside}, the recipe of that run" if inside.exists() else "name a recipe in it"
        raise UserError(f"{file} is a folder, not a recipe.", do=do)
    with parsing(file, recipe_errors.HELP):
        text = decoded(file.read_bytes(), file)
        try:
            return tomllib.loads(text)
        except ValueError as error:  # a number of more than 4300 digits is a plain ValueError
            raise UserError(f"{file} is not valid TOML: {error}.") from None


def _overridden(table: Table, overrides: Sequence[str]) -> list[str]:
    """Applies the overrides to `table`; their keys. A size named there takes the place of the one in the file."""
    keys = [_override(table, override) for override in overrides]
    for field, other in (("depth", "shape"), ("shape", "depth")):
        model = table.get("model")
        if isinstance(model, dict) and f"model.{field}" in keys and f"model.{other}" not in keys:
            model.pop(other, None)
    return keys


def _override(table: Table, text: str) -> str:
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise UserError(f"Not an override: {text!r}.", do="write key=value, such as train.steps=50")
    node: Any = table
    for position, (part, following) in enumerate(itertools.pairwise(parts)):
        child = _named(node, part) if isinstance(node, list) else node.setdefault(part, {})
        taken = ".".join(parts[: position + 1])
        if isinstance(child, list) and len(child) == 1 and _named(child, following) is None:
            child = child[0]
        elif isinstance(child, str) and f"{taken}.kind" in recipe_errors.known_keys():
            child = node[part] = {"kind": child}
        if not isinstance(child, dict) and not (isinstance(child, list) and _named(child, following) is not None):
            raise _no_such_part(key.strip(), taken, child)
        node = child
    parsed = _value(value.strip())
    if not isinstance(node, list):
        node[parts[-1]] = parsed
    elif parsed == "none":
        node.remove(_named(node, parts[-1]))
    else:
        raise UserError(f"{key.strip()} is a table.", do=f"{key.strip()}.KEY=value, or {key.strip()}=none without it")
    return ".".join(parts)


def _named(tables: Sequence[Any], name: str) -> Any:
    """The one of several tables with that name; None: there is none."""
    return next((table for table in tables if isinstance(table, dict) and table.get("name") == name), None)


def _no_such_part(key: str, taken: str, value: Any) -> UserError:
    what = f"{key} cannot be set: {taken} has no such part."
    if not isinstance(value, list):
        return UserError(what, why="it is a value, not a table", do=f"{taken}=VALUE")
    names = [item["name"] for item in value if isinstance(item, dict) and isinstance(item.get("name"), str)]
    do = f"{taken}.{names[0]}.KEY=value" if names else "give each of them a name"
    return UserError(what, why=f"it stands for several tables{': ' if names else ''}{', '.join(names)}", do=do)


def _value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _normalise(table: Table) -> Table:
    table = {"model": {}, **table}
    if isinstance(table.get("data"), dict):
        table["data"] = [table["data"]]
    if isinstance(table.get("model"), str):
        table["model"] = {"kind": table["model"]}
    if isinstance(table.get("model"), dict):
        table["model"] = {"kind": "module" if "build" in table["model"] else "gpt", **table["model"]}
        kind = model_kinds.tagged(table["model"].get("kind"))
        table = table if kind is None else kind.usual(table)
    for name, default in (("optimizer", "muon"), ("schedule", "stable")):
        train = table.get("train")
        if isinstance(train, dict) and isinstance(train.get(name), dict):
            table["train"] = {**train, name: {"kind": default, **train[name]}}
        elif isinstance(train, dict) and isinstance(train.get(name), str):
            table["train"] = {**train, name: {"kind": train[name]}}
    return table


# --- values ----------------------------------------------------------------------------------------


def _refuse_odd_values(table: Table, origin: str) -> None:
    """Refuses what TOML's text form cannot carry, wherever it stands: such a recipe could not be written to the run."""
    for key, value in leaves(table):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, float) and math.isnan(item):
                raise UserError(f"{origin}: {key} is not a number (nan).", do="give a number or leave the key out")
            if isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise UserError(f"{origin}: {key} is a number of more than 64 bits.", do="give a smaller one")
            if isinstance(item, str) and item.encode(errors="ignore").decode() != item:
                raise UserError(f"{origin}: {key} is not UTF-8 text: {item!r}.", do="save or name it as UTF-8")


def _same(left: Any, right: Any) -> bool:
    """Equal, and of one type: to a model's `arguments`, true and 1 are different things."""
    return type(left) is type(right) and bool(left == right)


def leaves(table: Any) -> Iterator[tuple[str, Any]]:
    """Each value that is not itself a table, with its dotted key. Not recursive: a recipe may nest very deeply."""
    waiting: list[tuple[str, Any]] = [("", table)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting.extend((f"{name}.{key}" if name else str(key), item) for key, item in value.items())
        elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
            waiting.extend((f"{name}.{position}", item) for position, item in enumerate(value))
        else:
            yield name, value
