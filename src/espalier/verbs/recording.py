"""The run log as rank 0 writes it, and the views that live on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from espalier.config import Recipe
from espalier.run import RunFolder
from espalier.track.events import Log
from espalier.track.progress import Progress


class Recording:
    """Rank 0 writes the run log and feeds every live view from the same events. Has state: the views."""

    def __init__(self, folder: RunFolder, recipe: Recipe, quiet: bool) -> None:
        self.folder, self.recipe, self.quiet = folder, recipe, quiet
        self.log = Log(folder.events)
        self.views: list[Any] = []

    def __enter__(self) -> Callable[..., None]:
        if self.recipe.track.tensorboard:
            from espalier.track.tensorboard import TensorBoard

            self.views.append(TensorBoard(self.folder.path / "tensorboard"))

        def emit(event: str, **fields: Any) -> None:
            self.log.write(event, **fields)
            if event == "run" and not self.quiet:
                self.views.append(Progress(fields["steps"], first_step=fields["step"]))
            for view in self.views:
                view.event({"event": event, **fields})

        return emit

    def __exit__(self, *error: object) -> None:
        for view in self.views:
            view.close()
