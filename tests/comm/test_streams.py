"""Work in another thread follows the launcher's stream and has ended with its block; without a GPU there is nothing."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from espalier.comm.compressed_collectives import following
from espalier.kernels import accelerator


def test_without_a_gpu_there_is_nothing_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> None:
        raise AssertionError("no device is asked")

    monkeypatch.setattr(accelerator, "begun", lambda: False)
    for name in ("current", "current_stream"):
        monkeypatch.setattr(accelerator, name, asked)
    with following():
        pass


def test_what_is_done_inside_comes_after_the_launcher_and_has_ended_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that writes down what it is told: no GPU is at hand."""
    told: list[Any] = []
    launcher = SimpleNamespace(record_event=lambda: told.append("recorded") or "event")
    other = SimpleNamespace(
        wait_event=lambda event: told.append(("waited", event)), synchronize=lambda: told.append("ended")
    )
    streams = [launcher, other]

    @contextmanager
    def device(number: int) -> Any:
        told.append(("on", number))
        yield

    fake = {"begun": lambda: True, "current": lambda: 3, "current_stream": lambda: streams.pop(0)}
    for name, stand_in in {**fake, "selected": device}.items():
        monkeypatch.setattr(accelerator, name, stand_in)
    after = following()
    told.append("launched")
    with after:
        told.append("done")
    assert told == ["recorded", "launched", ("on", 3), ("waited", "event"), "done", "ended"]
