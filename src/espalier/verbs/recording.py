"""The run log as rank 0 writes it, and the views that live on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from espalier.config import Recipe
from espalier.run import RunFolder
from espalier.track.events import Log
from espalier.track.progress import Progress


@contextmanager
def recording(folder: RunFolder, recipe: Recipe, quiet: bool) -> Iterator[Callable[..., None]]:
    """Gives what writes an event into the run log and shows it in every live view; these end with the block."""
    log, views = Log(folder.events), list[Any]()
    with ExitStack() as open_views:
        if recipe.track.tensorboard:
            from espalier.track.tensorboard import TensorBoard

            views.append(open_views.enter_context(closing(TensorBoard(folder.path / "tensorboard"))))

        def emit(event: str, **fields: Any) -> None:
            log.write(event, **fields)
            if event == "run" and not quiet:
                progress = Progress(fields["steps"], first_step=fields["step"])
                views.append(open_views.enter_context(closing(progress)))
            for view in views:
                view.event({"event": event, **fields})

        yield emit
