"""Text of others on a terminal: what a terminal would obey is shown, wherever it came from."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from espalier.cli import main as cli
from espalier.cli import printing
from espalier.recipe import terminal
from espalier.recipe.terminal import line, rows, say, visible
from espalier.track.events import Log
from espalier.track.progress import Progress, Waiting
from espalier.track.run_tables import RunTables

ATTACK = "\x1b]0;title\x07\x1b[2K\rgone\x9b1A\u202etxt"
SHOWN = r"\x1b]0;title\x07\x1b[2K\rgone\x9b1A\u202etxt"


@given(st.text(st.characters(codec=None)))
def test_what_is_said_holds_no_control_character_and_is_text(text):
    seen = visible(text)
    assert not {one for one in seen if unicodedata.category(one) == "Cc"} - {"\n", "\t"}
    assert seen.encode().decode() == seen
    assert visible(seen) == seen


@given(st.text(st.characters(categories=("L", "M", "N", "P", "S", "Zs"))))
def test_other_text_is_not_changed(text):
    assert visible(text) == text


def test_a_line_end_in_the_name_of_a_folder_of_the_command_ends_no_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_SPLIT", set())
    folder = tmp_path / "two\nlines"
    folder.mkdir()
    assert cli.main(["report", str(folder / "run")]) == 2
    assert cli.main(["train", "none.toml", f"data.path={folder}/none"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(r"two\nlines" in shown for shown in lines)
    assert not any(shown.startswith("lines") for shown in lines)
    terminal.know_paths(["a prompt\nof two lines"])  # no file
    for text in ("a prompt\nof two lines", "mystwo\nlines", "two\nlinesmen"):
        assert visible(text) == text


def test_answers_between_marks_are_green_on_a_terminal_and_nothing_of_theirs_is_obeyed(monkeypatch, capsys):
    line(f"asked ⟦{ATTACK}⟧ then")
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    line(f"asked ⟦{ATTACK}⟧ then ⟦b⟧", 0)
    said = capsys.readouterr().out.replace("\n", " ")
    assert said.count("\x1b[32m") == said.count("\x1b[0m") == 2
    assert said.count("\x1b") == 4
    assert "⟦b⟧" in said


def test_errors_are_shown_and_not_obeyed(capsys, tmp_path):
    assert cli.main(["train", str(tmp_path / f"{ATTACK}.toml")]) == 2
    assert SHOWN in (said := capsys.readouterr().err)
    assert "\x1b" not in said


def test_logs_are_diagnosed_without_being_obeyed(capsys, tmp_path):
    log = tmp_path / "job.log"
    log.write_text(f"Traceback (most recent call last):\nRuntimeError: {ATTACK[:20]} CUDA out of memory\n")
    assert cli.main(["diagnose", str(log)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_tables_are_as_wide_as_what_is_seen(capsys):
    rows(("a", "b"), [("x\x1b[1m", "[bold]y"), ("long name", "z")])
    head, first, _ = capsys.readouterr().out.splitlines()
    assert r"x\x1b[1m" in first
    assert first.index("[bold]y") == head.index("b")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_draws_names_and_errors_as_they_are_written(terminal):
    out = io.StringIO()
    progress = Progress(3, out=out, terminal=terminal)
    progress.event({"event": "incident", "kind": "raised", "what": f"[link=http://x]name[/link]{ATTACK}"})
    progress.close()
    assert SHOWN in out.getvalue().replace("\n", "")
    assert "[link=http://x]name[/link]" in out.getvalue().replace("\n", "")


def test_what_is_waited_for_is_neither_markup_nor_a_format():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out, now = Terminal(), iter(range(0, 100, 5))
    with Waiting("[bold]{task.id}\x1b[2J", 2, out=out, clock=lambda: next(now)) as waiting:
        waiting.advance()
    assert r"[bold]{task.id}\x1b[2J" in out.getvalue()


def test_a_finished_run_shows_its_sample_without_obeying_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(printing, "Console", lambda **_: Console(width=200, highlight=False))
    (tmp_path / "run.toml").write_text('[model]\nkind = "gpt"\n')
    with Log(tmp_path / "events.jsonl") as log:
        log.write("run", step=0, steps=2, ranks=1, workload="language")
        log.write("step", step=1, loss=1.0, seconds=1.0, tokens=1)
        log.write("sample", step=1, text=f"[red]def{ATTACK}")
    printing.finished(RunTables.read(tmp_path), tmp_path / "report.html", 1.0)
    assert f"[red]def{SHOWN}" in capsys.readouterr().out


def test_say_is_print_for_plain_text():
    ours, theirs = io.StringIO(), io.StringIO()
    for text in ("", "a\tb\nc", "ä [bold]"):
        say(text, file=ours)
        print(text, file=theirs)
    assert ours.getvalue() == theirs.getvalue()
