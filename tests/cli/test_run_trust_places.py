"""Places that a run's recipe names are used where this user has begun the run with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from espalier.checkpoint import run_identity
from espalier.cli import run_trust
from espalier.recipe import recipe_file
from espalier.recipe.errors import UserError
from espalier.train.run_folder import RunFolder

PLACES = {
    "checkpoint.target": "s3://bucket/run",
    "data.cache": "/disk/tokens",
    "data.path": "hf:owner/name",
    "store.path": "/disk/rows",
    "track.to": ["wandb", "mlflow"],
    "launch.command": "rsh {host} {command}",
    "launch.python": "/opt/python",
}
USED = PLACES.keys() - {"data.path"}  # which is fetched or refused, see refuse_hub
READ = {"checkpoint.target", "data.cache", "store.path"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run_with(folder: Path, places: dict[str, Any]) -> RunFolder:
    """A run folder whose recipe has these options; it has a checkpoint."""
    table: dict[str, Any] = {"model": {"kind": "gcn"}, "data": {"path": "graph.npz"}, "store": {"memory": "1MiB"}}
    for key, value in places.items():
        section, _, option = key.partition(".")
        table.setdefault(section, {})[option] = value
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    made = RunFolder(folder)
    made.recipe.write_text(recipe_file.dump(recipe_file.from_table(table, "test")))
    made.events.write_text(json.dumps({"event": "run"}) + "\n")
    return made


def seal(run: RunFolder) -> None:
    """As where this user begins the run."""
    identity = run_identity.new("run", "host", "meaning")
    sealed = msgspec.structs.replace(identity, seal=run_trust.seal_places(run.read()))
    run.identity.write_bytes(msgspec.json.encode(sealed))


def named(recipe: Any) -> set[str]:
    return {key.replace(".0.", ".") for key in run_trust.named_places(recipe)}


@pytest.mark.parametrize("writes", [True, False])
def test_places_of_somebody_else_are_as_by_default_and_the_note_names_each(tmp_path: Path, writes: bool) -> None:
    run = run_with(tmp_path / "run", PLACES)
    assert named(run.read()) == PLACES.keys()
    used = run_trust.usable(run, run.read(), trust=False, writes=writes)
    left_out = USED if writes else READ
    assert named(used.recipe) == PLACES.keys() - left_out
    assert all(f"{key} = " in used.note for key in left_out)
    trusted = run_trust.usable(run, run.read(), trust=True, writes=writes)
    assert trusted.recipe == run.read()
    assert all(f"{key} = " in trusted.note for key in left_out)


@pytest.mark.parametrize("key", PLACES)
def test_a_seal_is_good_for_every_place_and_no_other(tmp_path: Path, key: str) -> None:
    run = run_with(tmp_path / "run", PLACES)
    seal(run)
    assert run_trust.usable(run, run.read(), trust=False, writes=True) == (run.read(), "")
    changed = run_with(tmp_path / "changed", {**PLACES, key: ["trackio"] if key == "track.to" else "hf:{command}"})
    changed.identity.write_bytes(run.identity.read_bytes())
    with pytest.raises(UserError, match="is not fetched"):
        run_trust.refuse_hub(changed, run.read(), trust=False)
    assert run_trust.usable(changed, changed.read(), trust=False, writes=True).note


@pytest.mark.parametrize("seal", ["", "0" * 64, "é"])
def test_a_made_up_seal_is_none(tmp_path: Path, seal: str) -> None:
    run = run_with(tmp_path / "run", PLACES)
    identity = msgspec.structs.replace(run_identity.new("run", "host", "meaning"), seal=seal)
    run.identity.write_bytes(msgspec.json.encode(identity))
    assert run_trust.usable(run, run.read(), trust=False).note


def test_a_run_without_places_needs_no_seal_and_makes_no_key(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", {})
    seal(run)
    assert run_trust.usable(run, run.read(), trust=False, writes=True) == (run.read(), "")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("target", "read"), [("/disk/ck", True), ("file:///disk/ck", True), ("s3://b/ck", False)])
def test_checkpoints_in_a_folder_are_read_and_none_are_written_there(tmp_path: Path, target: str, read: bool) -> None:
    run = run_with(tmp_path / "run", {"checkpoint.target": target})
    used = run_trust.usable(run, run.read(), trust=False)
    assert (used.recipe.checkpoint.target == target) == read
    assert run_trust.usable(run, run.read(), trust=False, writes=True).recipe.checkpoint.target is None
    (run.checkpoints / "step-00000001").rmdir()
    with pytest.raises(UserError, match="where nothing is read or written"):
        run_trust.usable(run, run.read(), trust=False, writes=True)


def test_the_recipe_of_a_run_keeps_what_the_command_line_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path / "run", PLACES)
    given = ["checkpoint.target=s3://bucket/run", "launch.python=/my/python"]
    with pytest.raises(UserError, match="hf:owner/name, and is not fetched"):
        run_trust.load(run.recipe, given, trust=False)
    recipe = run_trust.load(run.recipe, [*given, "data.path=hf:owner/name"], trust=False)
    assert (recipe.checkpoint.target, recipe.launch.python) == ("s3://bucket/run", "/my/python")
    assert named(recipe) == {"checkpoint.target", "launch.python", "data.path"}
    note = capsys.readouterr().err
    assert "store.path" in note
    assert "checkpoint.target" not in note
    own = tmp_path / "recipe.toml"
    own.write_text(run.recipe.read_text())
    assert named(run_trust.load(own, [], trust=False)) == PLACES.keys()
