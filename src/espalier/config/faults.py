"""[faults]: what becomes of a run when something breaks. Imports no torch."""

from __future__ import annotations

from typing import Literal

from espalier.config.base import Options


class Faults(Options, frozen=True):
    """What becomes of a run when something breaks (docs/faults.md).

    `restarts`: how often one cause may be answered by starting again without the run getting further (`"auto"`: never
    where an unchanged run cannot succeed, once where code raised, else three times); `heartbeat`: between two signs of
    life of a rank; `memory`: what copies of the state may take of a machine's memory (`"auto"`: a quarter of what is
    free; 0: there are none, and a restart goes back to the newest checkpoint); `rollback`: steps in which a loss that
    rose may come back by itself before the run is put back and the batches are left out, or `"never"`; `plateau`: steps
    in which a loss is expected to fall while the learning rate is high; that it did not is reported, no more;
    `changed_data`: whether a run is taken up again on data that is not what it was begun with.
    """

    restarts: Literal["auto"] | int = "auto"
    heartbeat: str = "1s"
    memory: str | int = "auto"
    rollback: Literal["never"] | int = 50
    plateau: Literal["never"] | int = "never"
    changed_data: Literal["refuse", "accept"] = "refuse"
