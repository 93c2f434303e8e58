"""Progress: a bar on a terminal, else few plain lines."""

from __future__ import annotations

import io
import os
import re
import threading
from contextlib import closing, suppress
from typing import Any

import pytest

from espalier.recipe.units import show_size
from espalier.track import progress as shown
from espalier.track.progress import Forgiving, Progress, Stages, Waiting


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **fields: Any) -> dict[str, Any]:
    usual = {"loss": 2.5, "tokens": 4096, "seconds": 1.0, "mfu": 0.31, "memory": 1 << 30}
    return {"event": "step", "step": number, **usual, **fields}


def test_without_a_terminal_there_is_one_line_a_minute() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(300, out=out, clock=clock)
    for number in range(1, 301):
        clock.now += 1.0
        progress.event(step(number))
    progress.event({"event": "end", "reason": "finished", "seconds": 300.0})
    progress.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "training to step 300"
    assert lines[-1] == "finished at step 300 of 300 · loss 2.5 · 5 min 00 s"
    assert [line.split(" · ")[0] for line in lines[1:-1]] == [f"step {n}/300" for n in (1, 61, 121, 181, 241)]
    assert lines[2] == "step 61/300 · loss 2.5 · 4.10 k tok/s · MFU 31.0% · 1.00 GiB · 3 min 59 s left"


def test_what_is_no_text_counts_samples() -> None:
    out = io.StringIO()
    progress = Progress(2, out=out)
    progress.event({"event": "run", "workload": "graph"})
    progress.event(step(1))
    progress.close()
    assert "4.10 k samples/s" in out.getvalue()


def test_validations_and_incidents_always_have_a_line() -> None:
    out = io.StringIO()
    with closing(Progress(10, first_step=4, out=out, clock=Clock())) as progress:
        progress.event({"event": "validation", "time": 1.0, "step": 5, "loss": 1.5, "bits_per_byte": 2.164})
        progress.event({"event": "incident", "kind": "nan", "what": "loss is nan", "step": 6, "action": "stopped"})
    assert out.getvalue().splitlines() == [
        "training to step 10, from step 4",
        "validation at step 5 · loss 1.5 · bits per byte 2.164",
        "incident at step 6: loss is nan -> stopped",
        "stopped at step 4 of 10 · 0 µs",
    ]


def test_a_terminal_gets_a_bar_with_the_figures() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(3, out=out, terminal=True, clock=clock)
    for number in (1, 2, 3):
        clock.now += 1.0
        progress.event(step(number))
    progress.event({"event": "end", "reason": "finished", "seconds": 3.0})
    progress.close()
    assert "\x1b[" in out.getvalue()
    assert "3/3" in out.getvalue()
    assert "MFU 31.0%" in out.getvalue()


def test_steps_without_all_fields_still_show() -> None:
    out = io.StringIO()
    progress = Progress(3, out=out, clock=Clock())
    progress.event({"event": "step", "step": 1, "loss": None})
    progress.event({"event": "a name of tomorrow"})
    progress.close()
    assert "step 1/3" in out.getvalue()


def waited(seconds: float) -> list[str]:
    out, clock = io.StringIO(), Clock()
    with Waiting("Tokenizing", 100_000, show_size, out, clock) as waiting:
        for _ in range(100):
            clock.now += seconds / 100
            waiting.advance(1000)
    return out.getvalue().splitlines()


def test_a_run_that_ends_by_an_error_has_not_finished_wherever_it_stands() -> None:
    for ends, said in ((False, "finished at step 2 of 2"), (True, "stopped at step 2 of 2")):
        out = io.StringIO()
        with suppress(OSError), closing(Progress(2, out=out, clock=Clock())) as progress:
            progress.event(step(2))
            if ends:
                raise OSError("the disk is full")
        assert out.getvalue().splitlines()[-1].startswith(said)


def test_waiting_says_nothing_about_what_is_short() -> None:
    assert waited(1.0) == []


def test_waiting_says_once_a_minute_how_far_what_is_long_has_come() -> None:
    assert waited(100.0) == [
        "Tokenizing: 2% of 97.7 KiB",
        "Tokenizing: 62% of 97.7 KiB",
        "Tokenizing: 97.7 KiB in 1 min 40 s",
    ]


def test_stages_say_after_two_seconds_which_is_under_way_and_for_how_long() -> None:
    out, clock = io.StringIO(), Clock()
    with Stages("Cutting", out, clock, ticks=False) as stages:
        stages.begin("METIS", 0, 2)
        for _ in range(90):
            clock.now += 1.0
            stages.tick()
        stages.begin("sweep 1 of 10", 1, 2)
        clock.now += 40.0
        stages.tick()
    assert out.getvalue().splitlines() == [
        "Cutting: METIS, 0%, 2.0 s",
        "Cutting: METIS, 0%, 1 min 02 s",
        "Cutting: sweep 1 of 10, 50%, 2 min 10 s",
        "Cutting: 2 min 10 s",
    ]
    out = io.StringIO()
    with Stages("Cutting", out, clock, ticks=False) as stages:
        stages.begin("METIS", 0, 2)
        clock.now += 1.0
        stages.tick()
    assert out.getvalue() == ""


def test_stages_show_time_while_one_call_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends when its time was shown twice: a thread looks at the clock meanwhile, and ends with it."""
    monkeypatch.setattr(shown, "_TICK", 0.001), monkeypatch.setattr(shown, "_EVERY", 0.0)
    clock, before, many, twice = Clock(), set(threading.enumerate()), [0], threading.Event()
    clock.now = 1.0

    class Seen(io.StringIO):
        def write(self, text: str) -> int:
            many[0] += "METIS" in text
            if many[0] == 2:
                twice.set()
            return super().write(text)

    out = Seen()
    with Stages("Cutting", out, clock) as stages:
        stages.begin("METIS")
        clock.now += 100.0
        assert twice.wait(30)
    assert out.getvalue().splitlines()[1] == "Cutting: METIS, 1 min 40 s"
    assert not set(threading.enumerate()) - before, "threads of tests before may have ended meanwhile"


def test_closing_after_the_last_step_is_a_finish() -> None:
    out = io.StringIO()
    with closing(Progress(2, out=out, clock=Clock())) as progress:
        progress.event(step(1))
        progress.event(step(2))
    assert out.getvalue().splitlines()[-1].startswith("finished at step 2 of 2")


class Leaving(io.StringIO):
    """A reader that goes away after `writes` writes, or at the first flush."""

    def __init__(self, writes: int | None = None, terminal: bool = False) -> None:
        super().__init__()
        self.left, self.terminal = writes, terminal

    def write(self, text: str) -> int:
        if self.left == 0:
            raise BrokenPipeError
        self.left = None if self.left is None else self.left - 1
        return super().write(text)

    def flush(self) -> None:
        if self.left is None:
            raise OSError(28, os.strerror(28))

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("writes", [None, 0, 1, 3])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_reader_that_goes_away_never_ends_a_training(writes: int | None, terminal: bool) -> None:
    clock = Clock()
    out = Leaving(writes, terminal)
    with closing(Progress(300, out=out, clock=clock)) as progress:
        for number in range(1, 301):
            clock.now += 30.0
            progress.event(step(number))
        progress.event({"event": "incident", "what": "x"})
    with Waiting("Tokenizing", 100, show_size, Leaving(writes, terminal), clock) as waiting:
        for _ in range(10):
            clock.now += 60.0
            waiting.advance(10)


def test_a_forgiving_stream_is_the_stream_until_its_first_error_and_silent_after() -> None:
    with open(os.devnull, "w", encoding="latin-1") as file:
        stream = Forgiving(file)
        assert (stream.encoding, stream.fileno(), stream.name) == ("latin-1", file.fileno(), os.devnull)
    assert stream.write("closed") == 6
    reader, writer = os.pipe()
    os.close(reader)
    pipe = open(writer, "w", buffering=1)  # noqa: SIM115
    stream = Forgiving(pipe)
    assert stream.write("nobody\n" * 3) == 21
    stream.write("still nobody\n")
    stream.flush()
    assert not stream.isatty()
    with pytest.raises(BrokenPipeError):
        pipe.close()
    out = Leaving(2)
    stream = Forgiving(out)
    for text in "abcd":
        assert stream.write(text) == 1
    out.left = 9
    stream.write("e")
    assert out.getvalue() == "ab"


def test_beside_the_bar_every_figure_keeps_its_place() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(300, out=out, terminal=True, clock=clock)
    shown = []
    for number, loss in enumerate((12.345, 0.5, 0.001234, 2.0), start=1):
        clock.now += 10.0**number
        progress.event(step(number, loss=loss, tokens=7**number, memory=1 << (27 + number)))
        assert progress._bar is not None
        shown.append(progress._bar._bars.tasks[0].fields["figures"])
    progress.close()
    assert len({len(text) for text in shown}) == 1
    assert len({tuple(found.start() for found in re.finditer("·", text)) for text in shown}) == 1


def test_mfu_is_that_of_the_recent_steps_together() -> None:
    out, clock = io.StringIO(), Clock()
    progress = Progress(300, out=out, clock=clock)
    progress.event(step(1, mfu=0.5, seconds=3.0))
    clock.now += 61.0
    progress.event(step(2, mfu=0.1, seconds=1.0))
    progress.close()
    assert "MFU 40.0%" in out.getvalue().splitlines()[2]


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_step_is_whole_at_every_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    progress = Progress(120_000, out=out, terminal=True, clock=Clock())
    progress.event(step(119_999))
    progress.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", out.getvalue())]
    shown = [line for line in lines if "119999/120000" in line]
    assert shown
    assert all(len(line) <= columns and "loss 2.5" in line and "…" not in line for line in shown if "loss" in line)
