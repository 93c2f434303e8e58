"""What the log says: a task is done once all its figures are there; a torn line is read when it is whole."""

from __future__ import annotations

from pathlib import Path

from espalier.evaluate.eval_history import EvalHistory, ResultKey
from espalier.track import events
from espalier.track.events import Log

KEY = ResultKey("seal", "t", "hash")


def figure(log: Path, metric: str) -> None:
    cost = {"figures": 2, "records": 4, "seconds": 6.0}
    events.append(log, "eval", step=4, **KEY._asdict(), metric=metric, value=1.0, **cost)


def test_a_task_is_done_when_its_last_figure_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with Log(log) as training:
        training.write("run", step=0)
        training.write("checkpoint", step=4)
        history = EvalHistory(log)
        figure(log, "loss")
        history.update()
        assert "loss" in history.figures[KEY]
        assert KEY not in history.done
        training.write("step", step=5)
        figure(log, "accuracy")
        training.write("end", reason="finished")
    history.update()
    for one in (history, EvalHistory(log)):
        assert KEY in one.done
        assert ResultKey("seal", "t", "other content") not in one.done
        assert (one.saved, one.ended, one.seconds) == ({4}, "finished", {"t": 1.5})


def test_a_line_that_is_not_whole_yet_is_read_later_and_a_new_attempt_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text('{"event":"end","reason":"failed"}\n{"event":"ru')
    history = EvalHistory(log)
    assert history.ended == "failed"
    with log.open("a") as file:
        file.write('n"}\nnonsense\n{"event":"checkpoint","step":8}\n')
    history.update()
    assert (history.ended, history.saved) == ("", {8})


def test_a_failed_task_counts_as_done_and_is_not_said_again(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.touch()
    events.append(log, "incident", kind="eval", what="it broke", task="t", checkpoint="seal", content="hash")
    history = EvalHistory(log)
    assert KEY in history.done
    assert "it broke" in history.notes


def test_a_log_that_is_not_there_says_nothing(tmp_path: Path) -> None:
    history = EvalHistory(tmp_path / "events.jsonl")
    assert not history.ended
