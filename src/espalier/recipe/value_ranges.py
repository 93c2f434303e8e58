"""Value ranges: refuses values of options that cannot mean anything, and options that contradict others. No torch."""

from __future__ import annotations

import math
import operator
from typing import Any

from espalier import recipe as config
from espalier.recipe import mechanism_options, model_kinds, recipe_file, units
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError

_LIMITS = data_table(__file__)["limit"]


def check(recipe: config.Recipe) -> None:
    """Raises UserError for the first value out of bounds or that contradicts another. None is not looked at."""
    tag = recipe.model.__struct_config__.tag
    for limit in _LIMITS:
        for key in limit["keys"] if tag in limit.get("kinds", [tag]) else ():
            for given in _values(recipe, key.split(".")):
                value = _quantity(given, limit.get("unit", ""), key)
                within = (getattr(operator, name)(value, bound) for name, bound in limit["bounds"].items())
                if value is not None and not (math.isfinite(value) and all(within)):
                    why = f"it has to be {limit['words']}"
                    do = limit.get("do", f"correct {key}")
                    raise UserError(f"{key} = {given!r} is not possible.", why=why, do=do)
    model_kind = model_kinds.of(recipe.model)
    for kind in model_kinds.KINDS:
        for section in () if kind is model_kind else mechanism_options.tables_of(kind):
            options = mechanism_options.get(recipe, section)
            if options is not None and not (section == "store" and _of_states(recipe.store)):
                *first, last = (f'"{tag}"' for tag in kind.tags)
                tags = f"{', '.join(first)} or {last}" if first else last
                raise UserError(f"[{section}] belongs to {kind.name}.", do=f"model.kind = {tags}")
    model_kind.check(recipe)
    mechanism_options.check(recipe, model_kind)
    _batch(recipe.train)
    _places(recipe)


def _quantity(given: Any, unit: str, key: str) -> Any:
    """The number that is `given`, with a `unit` or plain; None: it is a word. Raises UserError for other text, and for
    a size whose unit was left out."""
    if given in ("auto", "never") or (isinstance(given, str) and not unit):
        return None
    if unit == "size" and isinstance(given, int) and 0 < given < 2**20:
        why = "a number alone is of bytes"
        raise UserError(f"{key} = {given} has no unit.", why=why, do=f'{key} = "{given}GiB"')
    return getattr(units, unit)(given, key) if unit else given


def _of_states(store: config.DiskOptions | None) -> bool:
    """Whether it only says where states of optimizer nodes lie, which any kind of model may have."""
    return store is not None and store.path is not None and store == type(store)(path=store.path)


def _places(recipe: config.Recipe) -> None:
    if recipe.comm.experts != "exact" and not hasattr(recipe.model, "experts"):
        raise UserError(
            f"comm.experts = {recipe.comm.experts!r} encodes rows of experts, and this model has none.",
            do='model.kind = "moe", or leave it out',
        )
    profile, target = recipe.track.profile, recipe.checkpoint.target
    if profile is not None and not 1 <= profile[0] <= profile[1]:
        raise UserError(
            f"track.profile = {list(profile)} names no step.",
            why="it is [from, to], the first step is 1, and both are included",
            do="track.profile = [10, 12]",
        )
    if target is not None and target.startswith("memory:"):
        raise UserError(
            f"checkpoint.target = {target!r} is not possible.",
            why="the checkpoint would be lost with the process",
            do="leave it out for the run folder, or name a folder",
        )
    # A run's name stands in paths, in job scripts, on pages and on terminals; `launch` in lines of shell.
    if recipe.name != recipe_file.plain_name(recipe.name):
        raise UserError(
            f"name = {recipe.name!r} is not possible.",
            why="a name is letters, digits, spaces and - _ ., "
            f"at most {recipe_file.LONGEST_NAME} bytes, no . or - first",
            do=f'name = "{recipe_file.plain_name(recipe.name)}"; --run FOLDER says where the run is kept',
        )
    if "{command}" not in recipe.launch.command:
        raise UserError(
            f"launch.command = {recipe.launch.command!r} has no {{command}}.",
            why="it stands for the shell command that starts a rank",
            do='launch.command = "ssh {host} {command}"',
        )
    python = recipe.launch.python
    if python is not None and (not python or python[0] == "-" or not python.isprintable()):
        raise UserError(
            f"launch.python = {python!r} is not possible.",
            why="it is the path of a program",
            do='launch.python = "/path/to/python"',
        )


def _values(struct: Any, path: list[str]) -> list[Any]:
    """The values at a dotted path: none where an alternative lacks the option or it is open, several in a tuple."""
    if isinstance(struct, tuple):
        return [value for item in struct for value in _values(item, path)]
    if not path:
        return [] if struct is None else [struct]
    return _values(getattr(struct, path[0]), path[1:]) if hasattr(struct, path[0]) else []


def _batch(train: config.Train) -> None:
    if train.batch_tokens and train.sequence and train.batch_tokens % train.sequence:
        below = train.batch_tokens // train.sequence * train.sequence or train.sequence
        raise UserError(
            f"train.batch_tokens = {train.batch_tokens} is not a whole number of sequences.",
            why=f"train.sequence = {train.sequence}",
            do=f"train.batch_tokens = {below}",
        )
    schedule = train.schedule
    if isinstance(schedule, config.Stable) and schedule.warmup is not None and schedule.warmup + schedule.decay > 1:
        raise UserError(
            "train.schedule.warmup and train.schedule.decay together are longer than the run.",
            why=f"they are shares of all steps: {schedule.warmup} + {schedule.decay}",
            do=f"train.schedule.decay = {1 - schedule.warmup:g}",
        )
