"""Progress of a run for people: a bar on a terminal, else one plain line a minute. Fed with the run log's events."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from espalier.recipe.errors import PeerLost
from espalier.recipe.resource import Resource
from espalier.recipe.terminal import say, visible
from espalier.recipe.units import plural, show_count, show_seconds, show_size
from espalier.track.events import Event
from espalier.track.startup import STARTUP

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_WINDOW = 50
"""Steps over which the rate and the time left are averaged."""
_EVERY = 60.0
_PATIENCE, _TICK = 2.0, 1.0
_WIDTHS = {"loss": 13, "speed": 12, "mfu": 9, "memory": 8, "left": 17}
"""Columns of each figure beside the bar, so that nothing jumps when a number gets longer."""
_BAR, _DROPPED = 24, ("mfu", "memory", "speed", "left")
"""Columns of the bar, and what a narrow terminal does not show, the first of them first."""


class Forgiving:
    """A text stream that outlives its reader: after its first OSError (a closed pipe, a full disk) it takes everything
    and writes nothing, as os.devnull does. Has state: whether that has come.

    `write`, `flush` and `isatty` raise no OSError; everything else is the stream's own: stdout's where there is none.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._gone = stream if stream is not None else sys.stdout, False

    def write(self, text: str) -> int:
        """Writes `text`; how many characters that is."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        """Whether the stream is a terminal that still listens."""
        return bool(self._try(self._stream.isatty))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, use: Callable[[], Any]) -> Any:
        if self._gone or self._stream.closed:
            return None
        try:
            return use()
        except OSError:
            self._gone = True
            return None


class Progress:
    """Shows a run of `total_steps` that begins after `first_step`. Has state: recent steps and the bar.

    Args:
        total_steps: steps of the whole run.
        first_step: steps done before (a resumed run).
        out: where to write; stdout when None.
        terminal: whether to draw a bar; None asks `out`.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        out: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.step = total_steps, first_step
        self._until = total_steps
        self._out = cast("TextIO", Forgiving(out))
        self._clock = clock
        self._began = self._said = clock()
        self._recent: deque[tuple[float, int, Event]] = deque(maxlen=_WINDOW)
        self._peak, self._unit = 0.0, "tok/s"
        self._open = True
        terminal = self._out.isatty() if terminal is None else terminal
        self._bar = _Bar(self._out, total_steps, first_step) if terminal else None
        self._line(f"training to step {total_steps:,}" + (f", from step {first_step:,}" if first_step else ""))

    def event(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "run":
            self._until = event.get("until", self.total)
            self._began -= time.time() - event["entered"] if "entered" in event else 0.0
            words = event.get("workload", "language") in ("language", "tune")
            self._unit = "tok/s" if words else "samples/s"
        elif kind == "step":
            self._take(event)
        elif kind == "validation":
            self._line(_validation(event))
        elif kind == "incident":
            self._line(trouble(event))
        elif kind == "prediction":
            self._line(event["what"])
        elif kind == "end":
            self._end(event)

    def close(self) -> None:
        """Leaves the terminal as it was; without an `end` event, says how far it came. While an exception passes, the
        run has not finished, wherever it stands."""
        if self._open:
            over = "finished" if self.step >= self.total else "phase finished"
            passing = sys.exc_info()[1]
            short = "attempt ended" if isinstance(passing, PeerLost) else "stopped"
            self._end({"reason": over if self.step >= self._until and passing is None else short})

    def _take(self, event: Event) -> None:
        now = self._clock()
        first = not self._recent
        self.step = event["step"]
        self._peak = max(self._peak, event.get("memory") or 0.0)
        self._recent.append((now, self.step, event))
        if self._bar:
            self._bar.show(self.step, self._figures())
        elif first or now - self._said >= _EVERY:
            self._line(f"step {self.step:,}/{self.total:,} · {' · '.join(self._figures().values())}")

    def _end(self, event: Event) -> None:
        if not self._open:
            return
        self._open = False
        if self._bar:
            self._bar.stop()
        loss = self._recent[-1][2].get("loss") if self._recent else None
        parts = [f"{event.get('reason', 'ended')} at step {self.step:,} of {self.total:,}"]
        parts += [event["what"]] if event.get("what") else []
        parts += [f"loss {loss:.4g}"] if loss is not None else []
        parts += [show_seconds(event.get("seconds") or self._clock() - self._began)]
        self._line(" · ".join(parts))

    def _figures(self) -> dict[str, str]:
        _, _, last = self._recent[-1]
        figures = {"loss": f"loss {last['loss']:.4g}"} if last.get("loss") is not None else {}
        seconds = sum(event.get("seconds") or 0.0 for _, _, event in self._recent)
        if seconds > 0:
            tokens = sum(event.get("tokens") or 0 for _, _, event in self._recent)
            figures["speed"] = f"{show_count(tokens / seconds)} {self._unit}"
        if last.get("mfu"):
            figures["mfu"] = f"MFU {self._mfu():.1%}"
        if self._peak:
            figures["memory"] = show_size(self._peak)
        left = self._left()
        return figures | ({"left": f"{show_seconds(left)} left"} if left is not None else {})

    def _mfu(self) -> float:
        """Of the recent steps together: weighed by their seconds, as tokens per second are."""
        pairs = [(event.get("mfu") or 0.0, event.get("seconds") or 0.0) for _, _, event in self._recent]
        total = sum(seconds for _, seconds in pairs)
        return float(sum(mfu * seconds for mfu, seconds in pairs) / total if total else pairs[-1][0])

    def _left(self) -> float | None:
        """Seconds to go at the recent rate by the clock, so that validation and checkpoints count; None at first."""
        (then, before, first), (now, step, _) = self._recent[0], self._recent[-1]
        if step <= before:
            seconds = first.get("seconds")
            return float(seconds) * (self.total - step) if seconds else None
        return (now - then) / (step - before) * (self.total - step)

    def _line(self, text: str) -> None:
        self._said = self._clock()
        if self._bar:
            self._bar.say(text)
        else:
            say(text, file=self._out, flush=True)


class _Bar:
    """rich's bar with our figures after it. Has state."""

    def __init__(self, out: TextIO, total: int, first: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn
        from rich.table import Column

        count = 2 * len(str(total)) + 1
        steps = MofNCompleteColumn(table_column=Column(min_width=count, no_wrap=True))
        figures = TextColumn("{task.fields[figures]}", markup=False, table_column=Column(no_wrap=True))
        room = shutil.get_terminal_size().columns - count - 1
        self._room = room - _BAR - 1 if room - _BAR > sum(_WIDTHS.values()) + 3 * (len(_WIDTHS) - 1) else room
        bars = [BarColumn(bar_width=_BAR)] if self._room < room else []
        columns: tuple[ProgressColumn, ...] = (steps, *bars, figures)
        self._bars, self._task = _bars(out, columns, total, figures="")
        self._bars.update(self._task, completed=first)

    def show(self, step: int, figures: dict[str, str]) -> None:
        padded = {name: text.ljust(_WIDTHS[name]) for name, text in figures.items()}
        for name in ("", *_DROPPED):  # the step stays whole
            padded.pop(name, None)
            shown = " · ".join(padded.values())
            if len(shown) <= self._room:
                break
        self._bars.update(self._task, completed=step, figures=shown)

    def say(self, text: str) -> None:
        self._bars.console.print(visible(text), markup=False, highlight=False)

    def stop(self) -> None:
        self._bars.refresh()
        self._bars.stop()


class Waiting(Resource):
    """Shows that something long is under way, once it has taken two seconds. Has state.

    `with Waiting("Tokenizing", total_bytes, show_size) as waiting: … waiting.advance(n)`. `show` writes amounts.
    """

    def __init__(
        self,
        what: str,
        total: float,
        show: Callable[[float], str] = show_count,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.done = what, total, 0.0
        self._show, self._clock = show, clock
        self._out = cast("TextIO", Forgiving(out))
        self._began = clock()
        self._said: float | None = None
        self._bars: tuple[Bars, TaskID] | None = None

    def advance(self, amount: float = 1.0) -> None:
        """`amount` more is done."""
        self.done += amount
        now = self._clock()
        if now - self._began < _PATIENCE:
            return
        if self._out.isatty():
            self._draw()
        elif self._said is None or now - self._said >= _EVERY:
            self._said = now
            say(f"{self.what}: {self._so_far(now - self._began)}", file=self._out, flush=True)

    def close(self) -> None:
        """Takes the bar away; says how long it took if it was long."""
        took = self._clock() - self._began
        if self._bars:
            self._bars[0].stop()
        if self._bars or self._said is not None:
            self._bars, self._said = None, None
            say(f"{self.what}: {self._in_all(took)}", file=self._out, flush=True)

    def _so_far(self, took: float) -> str:
        share = f"{self.done / self.total:.0%} of " if self.total else ""
        return f"{share}{self._show(self.total or self.done)}"

    def _in_all(self, took: float) -> str:
        return f"{self._show(self.done)} in {show_seconds(took)}"

    def _draw(self) -> None:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

        if self._bars is None:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                TimeRemainingColumn(),
            )
            self._bars = _bars(self._out, columns, self.total, transient=True, what=visible(self.what))
        bars, task = self._bars
        bars.update(task, completed=self.done, total=self.total or None)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows `what` on standard error once it has taken two seconds; called with (done, total)."""
    with Waiting(what, total=0, out=sys.stderr) as bar:

        def update(done: float, total: float) -> None:
            bar.total = total
            bar.advance(done - bar.done)

        yield update
    STARTUP.ended(what)


class Stages(Waiting):
    """As `Waiting`, of what cannot say in between how far it is: shows the stage, and the seconds since the beginning.
    Has state: a thread that looks at the clock every second (`ticks`).

    `with Stages("Ordering a graph") as stages: stages.begin("RCM++", 0, 2); …; stages.begin("clusters", 1, 2); …`.
    """

    def __init__(
        self, what: str, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic, ticks: bool = True
    ) -> None:
        super().__init__(what, 0.0, out=out if out is not None else sys.stderr, clock=clock)
        self._stage = ""
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stages", daemon=True) if ticks else None
        if self._thread is not None:
            self._thread.start()

    def begin(self, stage: str, done: float = 0.0, total: float = 0.0) -> None:
        """The next stage begins, when `done` of `total` is done; 0: nobody knows of how much."""
        with self._lock:
            self._stage, self.done, self.total = stage, done, total
            self.advance(0.0)

    def tick(self) -> None:
        """Shows what there is to show by now."""
        with self._lock:
            self.advance(0.0)

    def close(self) -> None:
        """Ends the thread; says how long all of it took if it was long."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
        super().close()

    def _so_far(self, took: float) -> str:
        share = f"{self.done / self.total:.0%}" if self.total else ""
        return ", ".join(filter(None, (self._stage, share, show_seconds(took))))

    def _in_all(self, took: float) -> str:
        return show_seconds(took)

    def _draw(self) -> None:
        super()._draw()
        assert self._bars is not None
        bars, task = self._bars
        bars.update(task, description=visible(f"{self.what}: {self._so_far(self._clock() - self._began)}"))

    def _run(self) -> None:
        while not self._over.wait(_TICK):
            self.tick()


def _bars(
    out: TextIO, columns: tuple[Any, ...], total: float, transient: bool = False, what: str = "", **fields: Any
) -> tuple[Bars, TaskID]:
    from rich.console import Console
    from rich.progress import Progress as Bars

    bars = Bars(*columns, console=Console(file=out, force_terminal=True), transient=transient, refresh_per_second=4)
    bars.start()
    return bars, bars.add_task(what, total=total or None, **fields)


def _validation(event: Event) -> str:
    skipped = ("event", "time", "step", "seconds")
    figures = [
        f"{key.replace('_', ' ')} {value:.4g}"
        for key, value in event.items()
        if key not in skipped and isinstance(value, int | float) and not key.rpartition(".")[2].isdecimal()
    ]  # figures of single columns are in the log
    return f"validation at step {event.get('step', 0):,} · {' · '.join(figures)}"


def trouble(event: Event) -> str:
    """One line of an incident, or of its end."""
    if event.get("event") == "recovered":
        lost = f"{plural(event['lost_steps'], 'step')} done again"
        return (
            f"recovered in {event['seconds']:.1f} s from step {event['step']:,} in {event.get('source', '')} ({lost})"
        )
    where = f" at step {event['step']:,}" if event.get("step") is not None else ""
    action = f" -> {event['action']}" if event.get("action") else ""
    return f"incident{where}: {event.get('what', event.get('kind', 'unknown'))}{action}"
