"""`espalier.open("runs/x")`: the tables of a run, and its trained model in one line. Imports no torch by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from espalier.track import run_tables


class Run(run_tables.RunTables):
    """What a run folder holds, its trained model included. Made by `open_run`."""

    def model(self, *, trust: bool = False) -> Any:
        """The `nn.Module` of the newest good checkpoint, in evaluation mode, on a GPU where there is one.

        It needs nothing but the folder. `trust`: whether code of somebody else's run may run. Raises UserError where
        there is no checkpoint yet.
        """
        from espalier.cli.load_run import trained

        return trained(self.folder, trust).model


def open_run(folder: str | Path) -> Run:
    """The run in `folder`. Raises UserError when there is no such folder, or no run in it."""
    path, events = run_tables.run_files(folder)
    return Run(path, events)
