"""Stores in processes of their own, for tests: begun, and ended before this process ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from espalier.launch.ranks.store_server import ServerProcess, serve


def end(process: ServerProcess) -> None:
    """Ends it, if it has not ended yet."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)


@contextmanager
def served() -> Iterator[int]:
    """The port on this machine where a store is served inside."""
    process = serve()
    try:
        yield process.port
    finally:
        end(process)
