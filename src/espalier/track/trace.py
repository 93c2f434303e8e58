"""A Chrome trace of some steps (`chrome://tracing`, https://ui.perfetto.dev), by `torch.profiler`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.errors import UserError
from espalier.track.events import unwritable

if TYPE_CHECKING:
    from torch.profiler import profile


class Profile:
    """Traces steps `from_step` to `to_step`, both included, into `path`. Has state: the profiler while it runs.

    Wrap each step: `with profile.step(n): …`. The file is written after `to_step`, or by `close` when the run ends
    before. Raises UserError when the range is empty or the file cannot be written.
    """

    def __init__(self, from_step: int, to_step: int, path: str | Path) -> None:
        if not 0 <= from_step <= to_step:
            raise UserError(f"track.profile = [{from_step}, {to_step}] names no step.", do="track.profile=[10,12]")
        self.first, self.last, self.path = from_step, to_step, Path(path)
        self._profiler: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Step `step` happens inside the block, and is traced when it is within the range."""
        if not self.first <= step <= self.last:
            self.close()
            yield
            return
        from torch.profiler import record_function

        if self._profiler is None:
            self._profiler = _started()
        with record_function(f"step {step}"):
            yield
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Ends a trace under way and writes it; otherwise does nothing."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        unfinished = self.path.with_name(self.path.name + ".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.touch()  # torch's own writer does not say why it cannot write
            profiler.export_chrome_trace(str(unfinished))
            os.replace(unfinished, self.path)
        except OSError as error:
            raise unwritable(self.path, error) from error


def _started() -> profile:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    profiler = profile(activities=activities)
    profiler.start()
    return profiler
