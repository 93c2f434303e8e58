"""Data path: the error for a `data.path` where nothing is. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from espalier.recipe.errors import UserError, nearest


def missing(path: str, known: str = "", key: str = "data.path =") -> UserError:
    """Of a path without a scheme; `known`: data that every machine has; `key`: where it was given."""
    place = Path(path).expanduser()
    parent = place.parent
    names = sorted(os.listdir(parent)) if parent.is_dir() and os.access(parent, os.R_OK) else []
    near = nearest(place.name, names)
    otherwise = f"check the path, or use path = {known!r}" if known else "check the path"
    return UserError(
        f"{key} {path!r} does not exist.",
        why="" if place.is_absolute() else f"looked from {os.getcwd()}",
        do=f"did you mean {parent / near}?" if near else otherwise,
    )
