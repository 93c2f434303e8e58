"""Peak memory: anonymous and shared pages this process holds and the most it held. Pages of files (a mapped corpus,
libraries) are the kernel's to drop and come with reading: they are counted apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")  # proc_pid_status(5)
_PEAK = Path("/proc/self/clear_refs")  # proc_pid_clear_refs(5): 5 sets VmHWM to what is there now


class _Peak:
    """The most held so far. Has state: what was seen at the last look."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins anew, as in a process that was just forked."""
        self.most = self._high = 0
        self._files: int | None = None

    def look(self, now: dict[str, int], reset: bool) -> int:
        """The most at any look, and of what rose and fell between two. `now`: what `_status` says; `reset`: the kernel
        begins its own peak anew after this look.

        The kernel keeps the most of all pages together. What of them was not of files is at least the rest beside the
        most of files at both looks, if they were held between these: where the kernel's peak was not reset at the last
        look, only if it rose since. Files that are mapped and dropped between two looks count.
        """
        files, high = now["RssFile"], now["VmHWM"]
        self.most = max(self.most, now["held"])
        if self._files is not None and high > self._high:
            self.most = max(self.most, high - max(files, self._files))
        self._files, self._high = files, 0 if reset else high
        return self.most


_peak = _Peak()


os.register_at_fork(after_in_child=_peak.forget)


def _status() -> dict[str, int]:
    """Bytes of every kind of memory by the kernel's name, and as `held` anonymous and shared pages."""
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
    return {**sizes, "held": sizes["RssAnon"] + sizes["RssShmem"]}


def _look(now: dict[str, int]) -> int:
    try:
        _PEAK.write_text("5")
        reset = True
    except OSError:  # some sandboxes have no such file
        reset = False
    return _peak.look(now, reset)


def bytes_held() -> int:
    """Bytes of anonymous and shared pages that this process holds now."""
    return _status()["held"]


def peak_memory(device: torch.device) -> int:
    """Most bytes this rank held at any look so far: allocated on a GPU; on a CPU anonymous and shared pages, also
    between two looks as far as the kernel tells."""
    if device.type != "cpu":
        from espalier.kernels import accelerator

        return accelerator.peak_memory(device)
    return _look(_status())


def memory_of(device: torch.device) -> dict[str, int]:
    """What a step says of memory: `memory`, the peak, and apart from it the `page_cache`; on a GPU `fragmentation`, the
    most bytes that PyTorch had reserved less the most that were allocated."""
    now = _status()
    sizes = {"memory": peak_memory(device), "page_cache": now["RssFile"]}
    if device.type != "cpu":
        from espalier.kernels import accelerator

        sizes["fragmentation"] = accelerator.peak_reserved(device) - sizes["memory"]
    return sizes
