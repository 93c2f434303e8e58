"""A Chrome trace of some steps (`chrome://tracing`, https://ui.perfetto.dev), by `torch.profiler`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from espalier.kernels import accelerator
from espalier.recipe.cache_dir import writing
from espalier.recipe.errors import UserError
from espalier.recipe.resource import Resource

if TYPE_CHECKING:
    from torch.profiler import profile


class StepProfiler(Resource):
    """Traces steps `from_step` to `to_step`, both included, into `path`. Has state: the profiler while it runs.

    `with Profile(10, 12, "trace.json") as profile:` round the loop, `profile.step()` after every step; `first_step`
    steps were done before (a resumed run). The file is written after `to_step`, or at the end of the block when the
    run ends before. Raises UserError when the range is empty or the file cannot be written.
    """

    def __init__(self, from_step: int, to_step: int, path: str | Path, first_step: int = 0) -> None:
        if not 1 <= from_step <= to_step:
            raise UserError(f"track.profile = [{from_step}, {to_step}] names no step.", do="track.profile=[10,12]")
        self.first, self.last, self.path = from_step, to_step, Path(path)
        self.done = first_step
        self._profiler: profile | None = None
        self._mark = ExitStack()

    def __enter__(self) -> Self:
        self._begin()
        return self

    def step(self) -> None:
        self._mark.close()
        self.done += 1
        self._begin()

    def _begin(self) -> None:
        """Marks the coming step when it is to be traced; a trace under way ends when it is not."""
        coming = self.done + 1
        if not self.first <= coming <= self.last:
            self.close()
            return
        from torch.profiler import record_function

        if self._profiler is None:
            self._profiler = _started()
        self._mark.enter_context(record_function(f"step {coming}"))

    def close(self) -> None:
        """Ends a trace under way and writes it; otherwise does nothing."""
        self._mark.close()
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        unfinished = self.path.with_name(self.path.name + ".tmp")
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.touch()  # torch's own writer does not say why it cannot write
            profiler.export_chrome_trace(str(unfinished))
            os.replace(unfinished, self.path)


def _started() -> profile:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * accelerator.available()
    profiler = profile(activities=activities)
    profiler.start()
    return profiler
