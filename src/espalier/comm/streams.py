"""A GPU's tensors in another thread: its work follows the launcher's stream, and has ended when the thread says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def following() -> AbstractContextManager[None]:
    """Called where a collective is launched. What is done inside the block, in whatever thread, begins after all that
    the launcher's current stream was given so far, and has ended when the block ends. Without a GPU: nothing."""
    if not torch.cuda.is_initialized():
        return nullcontext()
    return _after(torch.cuda.current_device(), torch.cuda.current_stream().record_event())


@contextmanager
def _after(device: int, ready: torch.cuda.Event) -> Iterator[None]:
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        stream.wait_event(ready)
        yield
        stream.synchronize()
