"""The run folder: opened, locked, compared, taken up again. Imports no torch.

run.toml  run.json  cluster.toml  plan.json  data.json  preprocessing/  events.jsonl  report.html  checkpoints/  logs/

`run.json` says which run it is: the id drawn at the first start (`checkpoint.run_identity`), which every checkpoint and
export names, and the seal of the places in its recipe (`cli.run_trust`).

The folder can be copied: what preprocessing decided of the data (tokenizer, classes, splits) is in `preprocessing/`, so
that predictions and exports need nothing else; paths to the data are absolute.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier import recipe as config
from espalier.checkpoint import run_identity
from espalier.machine import cluster as clusters
from espalier.plan import base as plans
from espalier.recipe import data_hash, recipe_file
from espalier.recipe.cache_dir import BEFORE, replace, replace_folder, table, writing
from espalier.recipe.errors import UserError

SHOWN = 3
"""Options of another run that its refusal names."""


@dataclass
class RunFolder:
    """A run's files. Has state: the locks of the folder and of `checkpoint.target`, held until the process ends.

    Attributes:
        recipe: resolved; cluster: the machines; plan: of the run, or of its phase.
        identity: which run it is.
        data: a hash for each file of the data, and the notes of its readers.
        preprocessing: what was decided of the data when the run began.
        events: the run log.
        checkpoints: the saved states, unless `checkpoint.target` names another place.
        logs: what each rank wrote to its standard error.
    """

    path: Path
    locks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.recipe, self.cluster = self.path / "run.toml", self.path / "cluster.toml"
        self.plan, self.data = self.path / "plan.json", self.path / "data.json"
        self.identity = self.path / run_identity.NAME
        self.events, self.checkpoints = self.path / "events.jsonl", self.path / "checkpoints"
        self.logs, self.preprocessing = self.path / "logs", self.path / "preprocessing"

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.recipe.exists()

    def is_begun(self) -> bool:
        """Whether it has a plan: one that was forked from another run, and not begun, has none."""
        return self.plan.exists() or not self.identity.exists()

    def write_recipe(self, recipe: config.Recipe) -> None:
        """Writes `run.toml`, whole or not at all."""
        replace(self.recipe, recipe_file.dump(located(recipe)))

    def write(self, recipe: config.Recipe, cluster: clusters.Cluster, plan: plans.Plan) -> None:
        """Writes the three files that say what this run is, each whole or not at all."""
        self.write_recipe(recipe)
        replace(self.cluster, clusters.dumps(cluster))
        replace(self.plan, plans.dumps(plan))

    def read(self) -> config.Recipe:
        """The resolved recipe of the run in this folder."""
        return recipe_file.load(self.recipe)

    def freeze(self, write: Callable[[Path], None] | None) -> None:
        """Keeps what `write` writes into a folder (None: nothing) as what preprocessing decided, with hashes, whole or
        not at all."""

        def fill(folder: Path) -> None:
            if write is not None:
                write(folder)
            replace(folder / _HASHES, json.dumps(data_hash.in_folder(folder), indent=1))

        with writing(self.preprocessing):
            replace_folder(self.preprocessing, fill)

    def kept(self) -> Path | None:
        """The folder of what preprocessing decided; None in the folder of a version that kept nothing. Raises UserError
        where it is not as it was written."""
        before = self.preprocessing.with_name(self.preprocessing.name + BEFORE)
        if before.exists() and not self.preprocessing.exists():  # killed while another took its place
            before.rename(self.preprocessing)
        if not self.preprocessing.exists():
            return None
        written = data_hash.in_folder(self.preprocessing)
        written.pop(_HASHES, None)
        changed = data_hash.differences(table(self.preprocessing / _HASHES), written)
        if changed:
            raise UserError(
                f"{self.preprocessing / changed[0]} since it was written.",
                why="the weights were trained with what was there",
                do="restore the folder from a copy of the run",
            )
        return self.preprocessing

    def lock(self, place: Path, name: str, other: str) -> None:
        """Locks the folder `place`, made if need be, against other processes, until `release`.

        Args:
            name: what it is, for messages; other: how another one is named.

        Raises UserError where another process has it, or it cannot be locked.
        """
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
            lock = os.open(place / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(lock, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            if isinstance(error, BlockingIOError):
                what = f"{name} {place} is in use by another process (pid {owner})."
                raise UserError(what, do=f"wait for it, stop it, or {other}") from None
            what = f"{name} {place} cannot be locked: {error.strerror}."
            raise UserError(what, do=f"mount that file system with locks (flock), or {other}") from None
        with contextlib.suppress(OSError):  # the number is a courtesy to whom finds the folder locked
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        self.locks += (lock,)

    def release(self) -> None:
        """Lets other processes have the folder, and the target."""
        for lock in self.locks:
            os.close(lock)
        self.locks = ()

    def discard_if_empty(self) -> None:
        """Removes a folder that holds nothing but the lock, such as that of a run refused before it began. One that
        cannot be removed, such as a mounted disk, stays."""
        with contextlib.suppress(OSError):
            if [*self.path.iterdir()] == [self.path / ".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()


_HASHES = "hashes.json"


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


def located(recipe: config.Recipe) -> config.Recipe:
    """`recipe` with absolute paths to its data, its weights and its checkpoints: they hold in any working directory."""
    sources = tuple(
        source.changed(
            path=_absolute(source.path),
            tokenizer=_absolute(source.tokenizer) if os.path.exists(source.tokenizer or "") else source.tokenizer,
            cache=_absolute(source.cache),
        )
        for source in recipe.data
    )
    model: Any = recipe.model
    if getattr(model, "initial", None) is not None:
        model = model.changed(initial=_absolute(model.initial))
    checkpoint = recipe.checkpoint.changed(target=_absolute(recipe.checkpoint.target))
    store = recipe.store
    if store is not None:
        path = tuple(map(_absolute, store.path)) if isinstance(store.path, tuple) else _absolute(store.path)
        store = store.changed(path=path)
    return recipe.changed(data=sources, model=model, checkpoint=checkpoint, store=store)


def _absolute(path: Any) -> Any:
    if path is None or (_SCHEME.match(path) and not os.path.exists(path)):
        return path
    return os.path.abspath(os.path.expanduser(path))


def find(path: str | Path) -> RunFolder:
    """The run in an existing folder. Raises UserError when there is none."""
    folder = RunFolder(Path(path))
    refuse_links(folder.path)
    if folder.exists():
        return folder
    if folder.path.is_file():
        raise UserError(f"{path} is a file, and this names a run folder.", do="the run's folder, such as runs/language")
    near = Path(path).parent if Path(path).parent.is_dir() else Path(".")
    runs = sorted(str(file.parent) for file in near.glob("*/run.toml"))
    raise UserError(
        f"There is no run in {path}.",
        why="a run folder holds run.toml, plan.json and events.jsonl",
        do=f"runs here: {', '.join(runs[:5])}" if runs else "espalier train examples/language.toml",
    )


def splits_in(path: str | Path) -> list[Path]:
    """The runs in a folder of runs of all splits (`graph.split = "all"`), by their numbers."""
    places = (file.parent for file in Path(path).glob("split-*/run.toml"))
    return sorted(places, key=lambda place: (len(place.name), place.name))


def refuse_links(path: Path) -> None:
    """Raises UserError where something in the run folder at `path` is a link that leads out of it, or neither a file
    nor a folder: what is appended to a log or cut off a lock would be elsewhere, and a pipe is waited for."""
    for place, folders, files in os.walk(path):
        for entry in (Path(place, name) for name in (*folders, *files)):
            with contextlib.suppress(FileNotFoundError):  # a run that goes on meanwhile
                _refuse_link(entry, path)


def _refuse_link(entry: Path, run: Path) -> None:
    mode = entry.lstat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    if not stat.S_ISLNK(mode):
        raise UserError(f"{entry} is neither a file nor a folder.", do="remove it")
    if not Path(os.path.realpath(entry)).is_relative_to(os.path.realpath(run)):
        raise UserError(
            f"{entry} is a link out of the run folder, to {os.readlink(entry)}.",
            why="what a run writes stays in its folder, also where somebody else has made it",
            do="remove the link; checkpoint.target keeps checkpoints elsewhere, --run the whole run",
        )


def path_of(recipe: config.Recipe, run: str | None) -> Path:
    """The folder of the recipe's run; `run`: as `--run` says."""
    return Path(run or Path("runs") / recipe.name)


def lock_folder(path: str | Path) -> RunFolder:
    """The folder at `path`, made if need be and locked against other processes. Raises UserError when it cannot be."""
    folder = RunFolder(Path(path))
    refuse_links(folder.path)
    folder.lock(folder.path, "The run folder", "give another folder with --run")
    return folder


def _in_common(before: config.Recipe, after: config.Recipe) -> tuple[config.Recipe, config.Recipe]:
    """Both with the tasks and towers that are in both only: others may come and go. As they are where no task stays."""

    def named(rows: Any, others: Any) -> Any:
        names = {row.name for row in others or ()}
        return tuple(sorted((row for row in rows or () if row.name in names), key=lambda row: row.name))

    if not named(before.tasks, after.tasks):
        return before, after
    train = before.train.changed(batch_tokens=after.train.batch_tokens)  # that of all tasks
    return (
        before.changed(tasks=named(before.tasks, after.tasks), towers=named(before.towers, after.towers), train=train),
        after.changed(tasks=named(after.tasks, before.tasks), towers=named(after.towers, before.towers)),
    )


def refuse_other_meaning(folder: RunFolder, recipe: config.Recipe) -> None:
    """Raises UserError when `recipe` (resolved) means another run than the one in `folder`."""
    before = folder.read()
    if recipe.train.precision == "auto":  # the plan decides it
        train = before.train.changed(precision="auto")
        before = before.changed(train=train)
    changed = recipe_file.changed(*map(located, _in_common(before, recipe)))
    if changed:
        shown = ", ".join(f"{key} = {old!r}, not {new!r}" for key, old, new in changed[:SHOWN])
        more = f" (and {len(changed) - SHOWN} more)" if len(changed) > SHOWN else ""
        raise UserError(
            f"{folder.path} holds a run with {shown}{more}.",
            why="resuming it would mix two different runs",
            do=f"name={folder.path.name}-2 or --run FOLDER for a new run, or set back what was changed",
        )
    old_steps = before.train.steps or 0
    new_steps = recipe.train.steps or 0
    if new_steps < old_steps:
        raise UserError(
            f"{folder.path} holds a run of train.steps = {old_steps}, not {new_steps}.",
            why="steps may grow, not shrink",
            do=f"train.steps={old_steps} or more, or --run for a new run",
        )
