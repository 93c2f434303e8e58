"""Skip list: the batches a run leaves out (`skips.json`), honoured by every later attempt.

Steps keep their numbers: where batches are left out, later ones move up, so a run still makes all its steps. No torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from espalier.recipe import serialization
from espalier.recipe.cache_dir import write_atomic
from espalier.recipe.foreign_files import parsing
from espalier.recipe.serialization import Value

NAME = "skips.json"


class Skips(Value, frozen=True, forbid_unknown_fields=True):
    """What is left out, and what is to be done about it.

    Attributes:
        batches: numbers of the batches left out, ascending; the first of a run is 0.
        suspects: batches with which a step was not finite once; a second time they are left out.
        back_to: steps; the next attempt begins from a state of at most so many. None: from the newest.
    """

    batches: tuple[int, ...] = ()
    suspects: tuple[int, ...] = ()
    back_to: int | None = None

    def batch(self, step: int) -> int:
        """The number of the batch that step `step` (from 0) takes."""
        number = step
        for left_out in self.batches:
            if left_out > number:
                break
            number += 1
        return number

    def without(self, first: int, last: int) -> Skips:
        """The batches of steps `first` to `last` (counted from 1) left out too, and the run put back before them."""
        more = {self.batch(step) for step in range(first - 1, last)}
        return Skips(tuple(sorted({*self.batches, *more})), self.suspects, first - 1)

    def suspecting(self, batch: int) -> Skips:
        """After a step with `batch` was not finite."""
        if batch not in self.suspects:
            return self.changed(suspects=(*self.suspects, batch))
        return self.changed(batches=tuple(sorted({*self.batches, batch})))

    def settled(self) -> Skips:
        """The run was put back."""
        return self.changed(back_to=None)


def read(folder: Path) -> Skips:
    """What the run in `folder` leaves out. Raises UserError where the file is damaged."""
    file = folder / NAME
    if not file.exists():
        return Skips()
    do = "it lists the batches that the run leaves out; correct it, or begin a new run with --run FOLDER"
    with parsing(file, do):
        return serialization.from_json(file.read_bytes(), Skips)


def write(folder: Path, skips: Skips) -> None:
    """Keeps `skips`, whole or not at all."""
    write_atomic(folder / NAME, msgspec.json.format(msgspec.json.encode(skips), indent=2) + b"\n")
