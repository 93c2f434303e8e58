"""Errors of recipes: unknown and misplaced keys, with the nearest right one, and values of another type or choice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from espalier import recipe as config
from espalier.recipe import mechanism_options
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError, nearest

Table = dict[str, Any]

HELP = "docs/recipe.md lists all keys and what they take"


def known_keys(kind: Any = config.Recipe, prefix: str = "", choices: bool = True) -> list[str]:
    """Every dotted key of the option tree, with `choices` also those of every alternative of a choice."""
    keys: list[str] = []
    for struct in _structs(kind):
        if struct.__struct_config__.tag is not None:
            keys.append(prefix + "kind")
            if not choices:
                continue
        for name, hint in mechanism_options.fields(struct, prefix.split(".")[:-1]).items():
            inner = known_keys(hint, f"{prefix}{name}.", choices)
            keys.extend(inner or [prefix + name])
    return sorted(set(keys))


def refuse_unknown(table: Mapping[str, Any], kind: Any, origin: str, path: tuple[str, ...] = ()) -> None:
    """Raises UserError for the first key of `table`, which stands at `path`, that options of `kind` do not have."""
    structs = _structs(kind)
    if not structs:
        return
    struct = _chosen(structs, table, origin, path)
    if struct is None:
        return
    hints = mechanism_options.fields(struct, path)
    for key, value in table.items():
        inner = (*path, key)
        if key not in hints and not (key == "kind" and struct.__struct_config__.tag is not None):
            raise _misplaced(key, structs, origin, path) or _unknown(inner, struct, origin)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and key in hints:
                refuse_unknown(item, hints[key], origin, inner)


def _chosen(structs: list[Any], table: Mapping[str, Any], origin: str, path: tuple[str, ...]) -> Any:
    tags = {struct.__struct_config__.tag: struct for struct in structs}
    if None in tags:
        return tags[None]
    kind = table.get("kind", next(iter(tags)))
    if not isinstance(kind, str) or kind not in tags:
        known = ", ".join(sorted(str(tag) for tag in tags))
        near = _choice(str(kind), [str(tag) for tag in tags])
        where = ".".join((*path, "kind"))
        raise UserError(
            f"{origin}: {where} = {kind!r} is not a choice.",
            why=f"the choices are {known}",
            do=f'{where} = "{near}"' if near else HELP,
        )
    return tags[kind]


def lead(word: str, kind: Literal["lead", "verb"] = "lead") -> tuple[str, str]:
    """The option (`verb`: the verb) that a `word` of other programs, or its last name alone, stands for (empty: nobody
    knows), and what differs."""
    name = word.lstrip("-").replace("-", "_")
    for row in data_table(__file__)[kind]:
        if name.lower().rpartition(".")[2] in row["words"].split():
            return row.get("to", ""), row.get("note", "")
    if kind == "verb":
        return "", ""
    always = known_keys(choices=False)  # comes before what a choice brings
    same_name = [key for key in (*always, *known_keys()) if f".{key}".endswith(f".{name}")]
    return next(iter(same_name), ""), ""


def _unknown(path: tuple[str, ...], struct: Any, origin: str) -> UserError:
    key = ".".join(path)
    near, note = lead(path[-1])
    if near in ("", key) and not note:
        sibling = nearest(path[-1], mechanism_options.fields(struct, path[:-1]))
        known = (other for other in known_keys() if other != key)
        near = (".".join((*path[:-1], sibling)) if sibling else nearest(key, known)) or ""
    section = "[" + ".".join(path[:-1]) + "]" if len(path) > 1 else "the top of the recipe"
    return UserError(
        f"{origin}: unknown key {key}.",
        why=f"{section} has no key {path[-1]!r}",
        do=" ".join(filter(None, (near and f"did you mean {near}?", note))) or HELP,
    )


def _choice(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` is another word for, or misspells."""
    words = data_table(__file__)
    known = (words["same"] | words["instead"]).get(word.lower())
    return known if known in choices else nearest(word, choices)


def _misplaced(key: str, structs: list[Any], origin: str, path: tuple[str, ...]) -> UserError | None:
    """The error for a key that belongs to another alternative of the same choice, if it does."""
    kinds = [str(other.__struct_config__.tag) for other in structs if key in mechanism_options.fields(other, path)]
    if not kinds:
        return None
    where = ".".join(path)
    return UserError(
        f"{origin}: {where}.{key} does not belong to the chosen kind.",
        why=f"{where} has it only with kind = {' | '.join(kinds)}",
        do=f'{where}.kind = "{kinds[0]}", or leave {key} out',
    )


def invalid(error: msgspec.ValidationError, table: Table, origin: str, overridden: Sequence[str]) -> UserError:
    """The error for a value that msgspec refused; `overridden`: keys given on the command line."""
    text, _, where = str(error).partition(" - at `$")
    where = where.rstrip("`")
    key = where.lstrip(".").replace("[...]", "").replace("[0]", "")
    if any(f"{key}.".startswith(f"{override}.") for override in overridden):
        origin = "on the command line"
    text = text.replace(" | null", "").replace("Object missing required field", "The recipe lacks the key")
    match = re.fullmatch(r"Invalid enum value '(.*)'", text, re.DOTALL)
    choices = _choices(key.split(".")) if match else []
    if match and choices:
        near = _choice(match[1], choices)
        absent = near and match[1] in data_table(__file__)["instead"]
        missing = f"training in {match[1]} is not there yet; " if absent else ""
        why, do = f"{missing}the choices are {', '.join(choices)}", f'{key} = "{near}"' if near else ""
        return UserError(f"{origin}: {key} = {match[1]!r} is not a choice.", why=why, do=do)
    expected, got, _ = text.partition(", got ")
    value = _at(table, where)
    if expected.startswith("Expected ") and got and value is not None:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
        text = f"expected {expected.removeprefix('Expected ').replace('`', '')}, got {shown}"
    return UserError(f"{origin}: {key + ': ' if key else ''}{text}.", do=HELP)


def _at(table: Any, where: str) -> Any:
    """What stands at msgspec's path `.data[0].path`; None when it does not lead to one value."""
    for name, place in re.findall(r"\.([^.\[]+)|\[([^\]]*)\]", where):
        if name and isinstance(table, dict):
            table = table.get(name)
        elif place.isdecimal() and isinstance(table, list):
            table = table[int(place)]
        else:
            return None
    return table


def _choices(path: list[str]) -> list[str]:
    """The words that the key at `path` may take, empty when it takes others."""
    kinds: list[Any] = [config.Recipe]
    for depth, part in enumerate(path):
        structs = [struct for kind in kinds for struct in _structs(kind)]
        options = [mechanism_options.fields(struct, path[:depth]) for struct in structs]
        kinds = [hints[part] for hints in options if part in hints]
    alternatives = [part for kind in kinds for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
    return [str(word) for part in alternatives for word in get_args(part)]


def _structs(kind: Any) -> list[Any]:
    """The option structs that an annotation allows: itself, the members of a union, the items of a tuple."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    if get_origin(kind) in (Union, UnionType, tuple):
        return [struct for part in get_args(kind) for struct in _structs(part)]
    return []
