"""What the log says: a task is done once all its figures are there; a torn line is read when it is whole."""

from __future__ import annotations

from pathlib import Path

from espalier.resilience.acme.evaluate.history import History
from espalier.track import events
from espalier.track.events import Log


def figure(log: Path, metric: str) -> None:
    key = {"step": 4, "task": "t", "checkpoint": "seal", "content": "hash", "figures": 2}
    events.append(log, "eval", **key, metric=metric, value=1.0)


def test_a_task_is_done_when_its_last_figure_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with Log(log) as training:
        training.write("run", step=0)
        training.write("checkpoint", step=4)
        history = History(log)
        figure(log, "loss")
        history.update()
        assert history.has("seal", "t", "hash", "loss")
        assert not history.done("seal", "t", "hash")
        training.write("step", step=5)
        figure(log, "accuracy")
        training.write("end", reason="finished")
    history.update()
    for one in (history, History(log)):
        assert one.done("seal", "t", "hash")
        assert not one.done("seal", "t", "other content")
        assert (one.saved, one.ended) == ({4}, "finished")


def test_a_line_that_is_not_whole_yet_is_read_later_and_a_new_attempt_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text('{"event":"end","reason":"failed"}\n{"event":"ru')
    history = History(log)
    assert history.ended == "failed"
    with log.open("a") as file:
        file.write('n"}\nnonsense\n{"event":"checkpoint","step":8}\n')
    history.update()
    assert (history.ended, history.saved) == ("", {8})


def test_a_failed_task_counts_as_done_and_is_not_said_again(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.touch()
    events.append(log, "incident", kind="eval", what="it broke", task="t", checkpoint="seal", content="hash")
    history = History(log)
    assert history.done("seal", "t", "hash")
    assert "it broke" in history.said


def test_a_log_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    history = History(tmp_path / "events.jsonl")
    assert not history.ended
