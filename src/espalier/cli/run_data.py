"""The data of a run: its hashes, compared when the run is taken up again, and what preprocessing decided of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from espalier.cli import prepare, run_places, run_seal
from espalier.parallel.workload import Workload
from espalier.recipe import Recipe, cache_dir, data_hash, serialization
from espalier.recipe.errors import UserError
from espalier.recipe.import_function import KEPT_CODE, unchanged_sources
from espalier.track import events
from espalier.train import run_folder as runs
from espalier.train import workload_registry


class DataRecord(msgspec.Struct, frozen=True):
    """What `data.json` holds: a hash for each file of the data, and the notes of its readers (`Workload.notes`), as on
    what they did not use. Earlier versions wrote the hashes alone."""

    hashes: Mapping[str, str]
    notes: tuple[str, ...] = ()


def read_record(folder: runs.RunFolder) -> DataRecord | None:
    """What the run's `data.json` holds; None where there is none. Raises UserError for a damaged one."""
    try:
        text = folder.data.read_bytes()
    except FileNotFoundError:
        return None
    with suppress(msgspec.DecodeError):
        return DataRecord(serialization.from_json(text, dict[str, str]))
    try:
        record: DataRecord = serialization.from_json(text, DataRecord)
    except msgspec.DecodeError as error:
        raise UserError(
            f"{folder.data} is damaged: {error}.", do="remove it; the present data is then accepted"
        ) from None
    return record


@dataclass(frozen=True)
class DataHashes:
    """What the data of a run is now, and what is to be said of it. `changed`: since the run was begun, and accepted."""

    hashes: Mapping[str, str]
    changed: Sequence[str] = ()
    notes: Sequence[str] = ()

    def keep(self, folder: runs.RunFolder, freeze: Callable[[Path], None], notes: Sequence[str] = ()) -> None:
        """Into the run folder, with what preprocessing decided (`freeze` writes it) and the `notes` of the data's
        readers; what changed into the run log."""
        folder.freeze(freeze)
        record = DataRecord(self.hashes, tuple(notes))
        cache_dir.replace(folder.data, json.dumps(msgspec.to_builtins(record), indent=1))
        if self.changed:
            with events.Log(folder.events) as log:
                log.write("data", changed=list(self.changed), action="accepted, as faults.changed_data says")


def data_of(folder: runs.RunFolder, recipe: Recipe, workload: Workload) -> DataHashes:
    """The run's data. Raises UserError where it is not what the run was begun with, unless the recipe accepts that:
    then the plan is made anew, as the batch may be another."""
    now = workload_registry.row(recipe).contents(runs.located(recipe), workload)
    if not folder.exists():
        return DataHashes(now)
    record = read_record(folder)
    if record is None:
        return DataHashes(now, notes=[f"{folder.path} has no data hashes: the present data is accepted"])
    before = record.hashes
    if recipe.tasks:  # each has data of its own, and may have come since
        both = before.keys() & now.keys()
        changed = _changes({name: before[name] for name in both}, {name: now[name] for name in both})
    else:
        changed = _changes(before, now)
    if not changed:
        return DataHashes(now)
    first, more = changed[0], f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    if recipe.faults.changed_data == "refuse":
        raise UserError(
            f"{first}{more} since {folder.path} was begun.",
            why="a run that resumes on other data cannot be reproduced",
            do="bring the data back, --run FOLDER for a new run, or faults.changed_data=accept to go on with it",
        )
    folder.plan.unlink(missing_ok=True)
    return DataHashes(now, changed, [f"the data has changed since the run began: {first}{more}"])


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """See `recipe.data_hash.differences`. Earlier versions have relative paths."""
    absolute = {path if (path := os.path.abspath(name)) in now else name: one for name, one in before.items()}
    return data_hash.differences(absolute, now)


def refuse_changed(folder: runs.RunFolder, recipe: Recipe, workload: Workload) -> None:
    """Raises UserError where the data is not what a run was trained on that has kept nothing of its preprocessing: its
    tokenizer and its classes would be derived from other data."""
    record = read_record(folder)
    now = workload_registry.row(recipe).contents(runs.located(recipe), workload)
    changed = _changes(record.hashes, now) if record else []
    if changed:
        raise UserError(
            f"{changed[0]} since {folder.path} was begun, and the run does not keep what it made of its data.",
            why="an earlier version began it; tokens and classes would be those of other data",
            do="bring the data back",
        )


@dataclass(frozen=True)
class DataChoice:
    """What of its data a run is opened with where its folder does not keep that: nothing; what evaluation needs
    (`evaluates`), or predictions (`predicts`); all of it (`trains`); or the data at `path`, in place of its own."""

    evaluates: bool = False
    predicts: bool = False
    trains: bool = False
    path: str | None = None

    def reads(self, recipe: Recipe, kept: Path | None) -> bool:
        """Whether the data itself is read, of a run that has `kept` this."""
        if self.trains or self.path is not None or kept is None:
            return True
        row = workload_registry.row(recipe)
        needed = self.evaluates or self.predicts or recipe.quant is not None  # widths are of all nodes
        return (self.evaluates and not row.evaluates) or (needed and row.lacks(kept))


NOTHING = DataChoice()


def resolved(
    folder: runs.RunFolder, recipe: Recipe, trust: bool = False, data: DataChoice = NOTHING
) -> prepare.Resolved:
    """The recipe of the run in `folder`, with the folder of the recipe file that it was begun from.

    Raises UserError where opening its workload would run the code of somebody who is not trusted (`run_seal`).
    """
    kept = folder.kept()
    reads = data.reads(recipe, kept)
    begun = [event for event in events.read(folder.events) if event["event"] == "run"] if folder.events.exists() else []
    last = begun[-1] if begun else {}
    origin = Path(last["recipe_folder"]) if last.get("recipe_folder") else None
    source = run_seal.Origin(origin, kept, reads)
    run_seal.check(recipe, source, str(last.get("seal", "")), str(folder.path), trust)
    if reads and data.path is None:
        run_places.refuse_hub(folder, recipe, trust)
    place = origin if kept is None or unchanged_sources(kept, origin) else kept / KEPT_CODE
    if data.path is not None:
        recipe = _with_data(recipe, data.path)
    return prepare.Resolved(recipe, folder=place, trust=trust, kept=kept, reads=reads)


def _with_data(recipe: Recipe, path: str) -> Recipe:
    if not recipe.data:
        raise UserError(
            f"--data {path} names no data of this run.",
            why="the function that model.build names reads it",
            do="leave --data out, or give that function another file in model.arguments of a new run",
        )
    data, graph = msgspec.structs.replace(recipe.data[0], path=path), recipe.graph
    if graph is not None and graph.halo is not None:  # `parts` is of the nodes of the run's own graph
        graph = msgspec.structs.replace(graph, halo=msgspec.structs.replace(graph.halo, parts=""))
    return msgspec.structs.replace(recipe, data=(data,), graph=graph)
