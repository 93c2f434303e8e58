"""`espalier diagnose`: short for people, one object to a line for programs, honest about what it cannot read."""

from __future__ import annotations

import json

import pytest

from espalier.cli import main as cli

FIELDS = ["file", "category", "reason", "root_line", "first_failing_rank", "suspect_node", "action", "evidence"]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("step 1\n[rank2]: KeyError: 'k'\n[rank0]: RuntimeError: Connection closed by peer [::1]:9\n")
    return path


def test_people_read_the_cause_and_what_to_do(log, capsys):
    assert cli.main(["diagnose", str(log)]) == 0
    said = capsys.readouterr().out
    assert "Key Error (Script)" in said
    assert "line 2, rank 2" in said
    assert "starting it again will not help" in said
    assert len(said.splitlines()) <= 8


def test_programs_read_one_object_to_a_line(log, tmp_path, capsys):
    other = tmp_path / "b.log"
    other.write_text("step 1\ntraining finished\n")
    assert cli.main(["diagnose", "--json", str(log), str(other)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(row)[:8] for row in rows] == [FIELDS, FIELDS]
    assert [(row["reason"], row["root_line"], row["action"]) for row in rows] == [
        ("Key Error", 2, "stop"),
        ("No Failure", None, "none"),
    ]


def test_one_bad_log_does_not_hide_the_others(log, tmp_path, capsys):
    (tmp_path / "bad").write_bytes(bytes(100))
    assert cli.main(["diagnose", "--json", str(tmp_path / "bad"), str(log), str(tmp_path / "no.log")]) == 2
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("reason", "refused") for row in rows] == ["refused", "Key Error", "refused"]
    assert cli.main(["diagnose", str(tmp_path / "no.log")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_folder_is_one_run(tmp_path, capsys):
    for rank in range(3):
        (tmp_path / f"rank{rank}.log").write_text("KeyError: 'k'\n" if rank == 1 else "Connection closed by peer\n")
    assert cli.main(["diagnose", "--json", str(tmp_path)]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["reason"], row["first_failing_rank"]) == ("Key Error", 1)


def test_rules_of_ones_own_and_their_mistakes(log, tmp_path, capsys):
    mine = tmp_path / "mine.toml"
    mine.write_text("[[rule]]\nid = 'k'\nreason = 'OS Error'\npatterns = [\"KeyError: 'k'\"]\n")
    assert cli.main(["diagnose", "--rules", str(mine), str(log)]) == 0
    assert "OS Error" in capsys.readouterr().out
    mine.write_text("[[rule]]\nid = 'k'\nreason = 'OS Error'\npatterns = ['(']\n")
    assert cli.main(["diagnose", "--rules", str(mine), str(log)]) == 2
    said = capsys.readouterr().err
    assert "rule 1 (k): pattern 1" in said
