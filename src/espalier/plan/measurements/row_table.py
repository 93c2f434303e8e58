"""Row tables: the words of one table of a measured row, each read as what it has to be. No torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from espalier.recipe.errors import UserError


class RowTable(dict[str, Any]):
    """One table of a row, without what is null. `where`: its name in errors."""

    where: str

    @classmethod
    def of(cls, row: Mapping[str, Any], where: str) -> RowTable:
        """The row's table of that name. Raises UserError."""
        value = row.get(where)
        if value is None and where not in ("train", "tune", "measured"):
            raise UserError(f"there is no {where!r}.", do=f'"{where}": {{…}}, as in docs/planner.md')
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{where} is not a table.", do=f'"{where}": {{…}}')
        words = cls((key, entry) for key, entry in (value or {}).items() if entry is not None)
        words.where = where
        return words

    @property
    def text(self) -> bytes:
        """The same for equal tables."""
        return msgspec.json.encode(dict(self), order="sorted")

    def count(self, key: str, default: int | None = None) -> int:
        """The whole number above 0 at a key. Raises UserError."""
        value = self.get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**53:
            raise self._impossible(key, f"{self.where}.{key} = a whole number, 1 or more")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The truth value at a key. Raises UserError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._impossible(key, f"{self.where}.{key} = true or false")
        return value

    def number(self, key: str) -> float | None:
        """The number above 0 at a key; None where there is none. Raises UserError."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise self._impossible(key, "a number above 0, or null")
        return float(value)

    def _impossible(self, key: str, do: str) -> UserError:
        return UserError(f"{self.where}.{key} = {self.get(key)!r} is not possible.", do=do)


def refuse_misspelled(words: Mapping[str, Any], known: Iterable[str], where: str, notes: set[str]) -> None:
    """Raises UserError for a misspelled key; a foreign one is left out, and said in `notes`."""
    for key in (key for key in words if key not in known):
        close = difflib.get_close_matches(key, [name for name in known if name not in words], n=1, cutoff=0.8)
        if close:
            raise UserError(f"unknown key {where}.{key}.", do=f"did you mean {where}.{close[0]}?")
        notes.add(f"{where}.{key} is not known here and was left out")
