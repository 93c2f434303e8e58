"""Signal handling: another handler for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Calls `handler` on those signals inside. A signal that is ignored, as SIGINT under `nohup … &`, stays ignored."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
