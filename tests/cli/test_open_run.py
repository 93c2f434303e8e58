"""A run folder opened: where its places are looked for on this machine, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from espalier.cli.open_run import SavedRun
from espalier.recipe import recipe_file
from espalier.train import run_folder as runs


def test_folders_of_another_machine_are_looked_for_in_the_run_and_the_cache(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "checkpoints").mkdir()
    table = {"model": {"kind": "sage"}, "data": {"path": "planted:nodes=9"}, "graph": {"fanout": [2]}}
    folder = runs.RunFolder(tmp_path)

    def located(there: str) -> tuple[str | None, object]:
        paths = {"checkpoint": {"target": there}, "store": {"path": [str(tmp_path / "here"), there]}}
        folder.recipe.write_text(recipe_file.dump(recipe_file.from_table({**table, **paths})))
        recipe = SavedRun.find(folder.path, trust=True).recipe
        assert recipe.store is not None
        return recipe.checkpoint.target, recipe.store.path

    present = str(tmp_path / "here")
    assert located(present) == (present, (present, present))
    assert located("/nowhere/at/all") == (None, None)
    assert located("s3://bucket/run")[0] == "s3://bucket/run"
    (tmp_path / "checkpoints").rmdir()
    assert located("/nowhere/at/all")[0] == "/nowhere/at/all"


@pytest.mark.parametrize("silent", [False, True])
def test_places_that_are_not_used_are_announced_once_unless_silent(
    tmp_path: Path, silent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = runs.RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    (folder.checkpoints / "step-00000001").mkdir()
    table = {"model": {"kind": "gcn"}, "data": {"path": "graph.npz"}, "checkpoint": {"target": "s3://bucket/run"}}
    folder.recipe.write_text(recipe_file.dump(recipe_file.from_table(table)))
    assert SavedRun.find(folder.path, silent=silent).recipe.checkpoint.target is None
    assert capsys.readouterr().err.count("checkpoint.target = 's3://bucket/run'") == (not silent)
