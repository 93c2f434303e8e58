"""Reads a recipe: TOML, then dotted overrides, into the structs of `config`; every mistake becomes a UserError."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import tomli_w

from espalier import config
from espalier.errors import UserError, nearest

Table = dict[str, Any]


def load(path: str | Path, overrides: Sequence[str] = ()) -> config.Recipe:
    """The recipe in file `path` with `key=value` overrides applied. Raises UserError, never anything else."""
    file = Path(path)
    table = _read(file)
    table.setdefault("name", file.stem)
    for override in overrides:
        _override(table, override)
    return from_table(table, str(path))


def from_table(table: Table, origin: str = "recipe") -> config.Recipe:
    """The recipe a TOML table says; `origin` names the table in messages."""
    table = _normalise(table)
    _refuse_unknown(table, config.Recipe, origin, ())
    try:
        return msgspec.convert(table, config.Recipe, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(f"{origin}: {_say(error)}", do="see `espalier train --help` and docs/recipe.md") from None


def to_table(recipe: config.Recipe) -> Table:
    """The recipe as a plain table without the keys that are None (TOML has no null)."""
    table: Table = msgspec.to_builtins(recipe)
    return _drop_none(table)


def dump(recipe: config.Recipe) -> str:
    """The recipe as TOML text; `load` of it gives the same recipe."""
    return tomli_w.dumps(to_table(recipe))


def changed(before: config.Recipe, after: config.Recipe) -> list[tuple[str, Any, Any]]:
    """The keys whose change alters the meaning of a run, as (key, before, after)."""
    left, right = dict(_leaves(to_table(before))), dict(_leaves(to_table(after)))
    found = []
    for key in sorted({*left, *right}):
        if left.get(key) == right.get(key):
            continue
        if any(key == free or key.startswith(free + ".") for free in config.RESUMABLE):
            continue
        found.append((key, left.get(key), right.get(key)))
    return found


def known_keys(kind: Any = config.Recipe, prefix: str = "") -> list[str]:
    """Every dotted key of the option tree, all alternatives of every choice included."""
    keys: list[str] = []
    for struct in _structs(kind):
        if struct.__struct_config__.tag is not None:
            keys.append(prefix + "kind")
        for name, hint in get_type_hints(struct).items():
            inner = known_keys(hint, f"{prefix}{name}.")
            keys.extend(inner or [prefix + name])
    return sorted(set(keys))


# --- reading -----------------------------------------------------------------------------------------------------


def _read(file: Path) -> Table:
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"No recipe at {file}.", do="espalier train examples/language.toml") from None
    except OSError as error:
        raise UserError(f"The recipe {file} cannot be read: {error.strerror}.") from None
    try:
        return tomllib.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text (byte {error.start}).", do="save the recipe as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from None
    except RecursionError:
        raise UserError(f"{file} nests its tables too deeply.") from None


def _override(table: Table, text: str) -> None:
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise UserError(f"Not an override: {text!r}.", do="write key=value, such as train.steps=50")
    node = table
    for position, part in enumerate(parts[:-1]):
        child = node.setdefault(part, {})
        if isinstance(child, list) and len(child) == 1:
            child = child[0]
        if not isinstance(child, dict):
            taken = ".".join(parts[: position + 1])
            why = "it stands for several tables" if isinstance(child, list) else "it is a value, not a table"
            raise UserError(f"{key.strip()} cannot be set: {taken} has no such part.", why=why)
        node = child
    node[parts[-1]] = _value(value.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text


def _normalise(table: Table) -> Table:
    table = dict(table)
    if isinstance(table.get("data"), dict):
        table["data"] = [table["data"]]
    if isinstance(table.get("model"), dict):
        table["model"] = {"kind": "module" if "build" in table["model"] else "gpt", **table["model"]}
    for name, default in (("optimizer", "muon"), ("schedule", "stable")):
        train = table.get("train")
        if isinstance(train, dict) and isinstance(train.get(name), dict):
            table["train"] = {**train, name: {"kind": default, **train[name]}}
        elif isinstance(train, dict) and isinstance(train.get(name), str):
            table["train"] = {**train, name: {"kind": train[name]}}
    return table


# --- naming what is wrong ----------------------------------------------------------------------------------------


def _refuse_unknown(table: Mapping[str, Any], kind: Any, origin: str, path: tuple[str, ...]) -> None:
    structs = _structs(kind)
    if not structs:
        return
    struct = _chosen(structs, table, origin, path)
    if struct is None:
        return
    hints = get_type_hints(struct)
    for key, value in table.items():
        here = (*path, key)
        if key not in hints and not (key == "kind" and struct.__struct_config__.tag is not None):
            raise _unknown(here, struct, origin)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and key in hints:
                _refuse_unknown(item, hints[key], origin, here)


def _chosen(structs: list[Any], table: Mapping[str, Any], origin: str, path: tuple[str, ...]) -> Any:
    tags = {struct.__struct_config__.tag: struct for struct in structs}
    if None in tags:
        return tags[None]
    kind = table.get("kind", next(iter(tags)))
    if not isinstance(kind, str) or kind not in tags:
        known = ", ".join(sorted(str(tag) for tag in tags))
        near = nearest(str(kind), [str(tag) for tag in tags])
        where = ".".join((*path, "kind"))
        raise UserError(
            f"{origin}: {where} = {kind!r} is not a choice.",
            why=f"the choices are {known}",
            do=f'{where} = "{near}"' if near else "",
        )
    return tags[kind]


def _unknown(path: tuple[str, ...], struct: Any, origin: str) -> UserError:
    key = ".".join(path)
    known = known_keys()
    same_name = [other for other in known if other.split(".")[-1] == path[-1] and other != key]
    sibling = nearest(path[-1], get_type_hints(struct))
    if sibling:
        near: str | None = ".".join((*path[:-1], sibling))
    else:
        near = same_name[0] if same_name else nearest(key, known)
    section = "[" + ".".join(path[:-1]) + "]" if len(path) > 1 else "the top of the recipe"
    return UserError(
        f"{origin}: unknown key {key}.",
        why=f"{section} has no key {path[-1]!r}",
        do=f"did you mean {near}?" if near else "",
    )


def _say(error: msgspec.ValidationError) -> str:
    text, _, where = str(error).partition(" - at `$")
    key = where.rstrip("`").lstrip(".").replace("[...]", "").replace("[0]", "")
    return f"{key}: {text}." if key else f"{text}."


def _structs(kind: Any) -> list[Any]:
    """The option structs that an annotation allows: itself, the members of a union, the items of a tuple."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    if get_origin(kind) in (Union, UnionType, tuple):
        return [struct for part in get_args(kind) for struct in _structs(part)]
    return []


def _drop_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_drop_none(item) for item in value]
    return value


def _leaves(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in items:
        name = f"{prefix}{key}"
        holds_tables = isinstance(value, list) and value and isinstance(value[0], dict)
        if isinstance(value, dict) or holds_tables:
            yield from _leaves(value, name + ".")
        else:
            yield name, value
