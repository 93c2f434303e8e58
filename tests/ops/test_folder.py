"""A run's folder is one case, told by the rank that knows; other folders are as many cases as logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.ops import diagnosis
from espalier.ops.diagnosis import diagnose
from espalier.recipe.errors import UserError


def write(root, **texts):
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_rank_that_knows_tells(tmp_path):
    for rank in range(4):
        (tmp_path / f"rank{rank}.log").write_text("RuntimeError: Connection closed by peer [::1]:9\n")
    (tmp_path / "rank2.log").write_text("step 1\nIndexError: list index out of range\n")
    (found,) = diagnose(tmp_path)
    assert (Path(found.file).name, found.reason, found.root_line, found.first_failing_rank) == (
        "rank2.log",
        "Index Error",
        2,
        2,
    )


def test_our_own_run_folder_is_one_case(tmp_path):
    write(
        tmp_path,
        events_dot_jsonl='{"event":"run","time":1}\n',
        run_dot_toml="",
        **{"logs__trainer-1_dot_log": "KeyError: 'k'\n"},
    )
    (found,) = diagnose(tmp_path)
    assert (found.reason, found.first_failing_rank) == ("Key Error", 1)


def test_losses_of_the_event_log_count(tmp_path):
    steps = "".join(f'{{"event":"step","time":1,"step":{at},"loss":{2.0 if at < 30 else 9.0}}}\n' for at in range(60))
    write(tmp_path, events_dot_jsonl=steps)
    (found,) = diagnose(tmp_path)
    assert (found.reason, found.root_line) == ("Loss Anomaly", 31)


def test_logs_of_several_jobs_are_several_cases(tmp_path):
    write(
        tmp_path, alpha_dot_log="KeyError: 'k'\n", beta_dot_log="TypeError: x\n", notes_dot_md="ValueError: not a log\n"
    )
    assert [one.reason for one in diagnose(tmp_path)] == ["Key Error", "Type Error"]


def test_a_file_that_is_no_text_is_left_out_of_a_run(tmp_path):
    (tmp_path / "rank0.log").write_bytes(bytes(100))
    (tmp_path / "rank1.log").write_text("KeyError: 'k'\n")
    assert [one.reason for one in diagnose(tmp_path)] == ["Key Error"]
    (tmp_path / "rank1.log").write_bytes(bytes(100))
    with pytest.raises(UserError, match="No log in the folder"):
        diagnose(tmp_path)


def test_a_folder_without_logs_is_named(tmp_path):
    with pytest.raises(UserError, match="no log in the folder"):
        diagnose(tmp_path)


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank3.log", 3), ("trainer-12.log", 12), ("attempt_0/5/stderr.log", 5), ("job.7.err", 7), ("train.log", None)],
)
def test_ranks_of_file_names(tmp_path, name, rank):
    assert diagnosis.rank_of(tmp_path / name, tmp_path) == rank
