"""Event fields: what the fields of a run log hold (`event_fields.toml`). A log of somebody else may hold anything."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from espalier.recipe.data_table import data_table
from espalier.recipe.foreign_files import printable

_LARGEST = 1e200
"""Of numbers, so that their sums are finite."""
_KINDS: dict[str, Any] = {
    "whole": Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)],
    "number": float,
    "process": Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)],
    "text": str,
    "numbers": dict[str, float],
    "table": dict[str, Any],
    "texts": list[str],
    "cells": list[list[Any]],
}


class _Event(msgspec.Struct, kw_only=True):
    event: str = ""
    time: Annotated[float, msgspec.Meta(ge=0, lt=253402300800)] | None = None  # before the year 10000


def _form(kind: str) -> Any:
    table = _TABLES[kind]
    fields: list[Any] = [
        (name, form) if name in table.get("needed", ()) else (name, form | None, None)
        for word, form in _KINDS.items()
        for name in table.get(word, ())
    ]
    return msgspec.defstruct(kind, fields, bases=(_Event,), kw_only=True)


_TABLES = data_table(__file__)
_KINDS |= {"moved": dict[str, _form("Moved")], "node": _form("Node"), "reasons": list[_form("Reason")]}  # type: ignore[misc]
_FORMS = {kind: _form(kind) for kind in _TABLES}


def misfit(event: dict[str, Any]) -> str:
    """Why a line of a log is no event, as a predicate; empty: it is one."""
    try:
        form = _FORMS.get(str(event["event"]))
        msgspec.convert(event, form or _Event)
        return "it has a number of more than 200 digits" if form and _is_large(event) else ""
    except (msgspec.ValidationError, ArithmeticError) as error:
        return printable(error)


def _is_large(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_is_large, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float) and _LARGEST < abs(value) < math.inf
