"""What is refused in a run folder that somebody else may have made."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from espalier.recipe.errors import UserError
from espalier.train import run_folder as run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    (made / "checkpoints").mkdir(parents=True)
    (made / "run.toml").write_text('[model]\nkind = "gpt"\n')
    (made / "events.jsonl").write_text('{"event": "run"}\n')
    return made


@pytest.mark.parametrize("open_run", [run.find, run.lock_folder])
@pytest.mark.parametrize(
    "name",
    [".lock", "events.jsonl", "run.toml", "report.html", "logs", "eval", "checkpoints/step-4", "logs/rank-0.log"],
)
def test_a_link_out_of_the_run_folder_is_refused_and_what_it_names_stays(folder, tmp_path, name, open_run) -> None:
    precious = tmp_path / "precious"
    precious.write_text("export A=1\nunfinished")
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to("../" * len(Path(name).parts) + "precious")
    with pytest.raises(UserError, match=re.escape(f"{name} is a link out of the run folder")) as caught:
        open_run(folder)
    assert "checkpoint.target" in str(caught.value)
    assert precious.read_text() == "export A=1\nunfinished"


def test_a_link_to_nothing_or_to_itself_leads_nowhere_good(folder, tmp_path) -> None:
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").symlink_to(tmp_path / "not there")
    with pytest.raises(UserError, match="is a link out of"):
        run.lock_folder(folder)
    assert not (tmp_path / "not there").exists()


def test_a_pipe_is_not_waited_for(folder) -> None:
    (folder / "events.jsonl").unlink()
    os.mkfifo(folder / "events.jsonl")
    with pytest.raises(UserError, match="is neither a file nor a folder"):
        run.find(folder)


def test_a_run_folder_may_itself_be_a_link_and_hold_links_within(folder, tmp_path) -> None:
    (folder / "latest").symlink_to("checkpoints")
    (tmp_path / "short").symlink_to(folder)
    run.lock_folder(tmp_path / "short").release()
    assert run.find(tmp_path / "short").exists()
