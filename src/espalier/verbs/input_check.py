"""Input check: what can be said of a command line before torch is imported. Imports no torch."""

from __future__ import annotations

import argparse
import glob
from pathlib import Path

from espalier import cluster as clusters
from espalier import run as runs
from espalier.config import data_path, defaults, model_kinds, recipe_file


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for a recipe, a cluster file, a run folder or a path of data that cannot be used."""
    elsewhere = any(getattr(arguments, name, None) for name in ("hosts", "slurm"))  # where the data may lie
    if getattr(arguments, "recipe", None) is not None and getattr(arguments, "score", None) is None:
        recipe = recipe_file.load(arguments.recipe, arguments.overrides)
        if getattr(recipe.model, "initial", None) is None:  # else the weights say the sizes
            defaults.resolve(recipe)
        named = getattr(arguments, "cluster", None) or recipe.plan.cluster
        if named is not None:
            clusters.read(named)
        known = model_kinds.of(recipe.model).data
        if known and arguments.verb == "train" and not elsewhere:
            for data in recipe.data:
                place = Path(data.path).expanduser()
                plain = data.path.strip() and ":" not in data.path and not glob.has_magic(data.path)
                # A graph may be one of several in a folder: ind.NAME.graph.
                if plain and not place.exists() and not any(place.parent.glob(f"*.{glob.escape(place.name)}.*")):
                    raise data_path.missing(data.path, known)
    elif arguments.verb in ("eval", "predict", "export", "report"):
        for run in [arguments.run] if arguments.verb != "report" else arguments.runs:
            runs.find(run)
