"""What a run means, and where its checkpoints are below a shared target."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from espalier.checkpoint import run_identity
from espalier.checkpoint.storage import open_place
from espalier.cli import run_owner
from espalier.recipe import Recipe, import_function, recipe_file
from espalier.recipe.errors import UserError
from espalier.train.run_folder import RunFolder


def recipe(target: Path | str | None = None, **model: str) -> Recipe:
    table = {"model": {"kind": "gcn"} | model, "data": {"path": "graph.npz"}}
    return recipe_file.from_table(table | ({} if target is None else {"checkpoint": {"target": str(target)}}))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_code_of_a_run_counts_in_what_it_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    build = "built_for_run_owner:make"
    means = []
    for text in ("1", "22", "1"):
        (tmp_path / "built_for_run_owner.py").write_text(f"def make():\n    return {text}\n")
        sys.modules.pop("built_for_run_owner", None)
        import_function.function(build, tmp_path)
        means.append(run_owner.meaning(recipe_file.from_table({"model": {"kind": "module", "build": build}}), "data"))
    assert means[0] == means[2] != means[1]


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_runs_below_one_target_have_a_folder_each_and_find_it_again(tmp_path: Path, scheme: str) -> None:
    target = f"{scheme}{tmp_path}/shared"
    owners = [run_owner.owner_of(RunFolder(tmp_path / name), recipe(target), "data") for name in ("a", "b")]
    places = [owner.recipe.checkpoint.target for owner in owners]
    assert places == [f"{target}/{owner.identity.run.folder}" for owner in owners]
    for owner in owners:
        owner.saved.place.claim(msgspec.json.encode(owner.identity.run))
    lost = run_owner.owner_of(RunFolder(tmp_path / "a"), recipe(target), "data")
    assert (lost.identity.run, lost.recipe.checkpoint.target) == (owners[0].identity.run, places[0])
    assert any("the run goes on as that one" in note for note in lost.notes)
    other = run_owner.owner_of(RunFolder(tmp_path / "a"), recipe(target), "other data")
    assert other.recipe.checkpoint.target not in places
    with pytest.raises(UserError, match=r"owner.json belongs to run a .* of host .*, begun on"):
        run_owner.owner_of(RunFolder(tmp_path / "c"), recipe(places[0]), "other data")


def test_a_name_in_an_identity_leads_nowhere_else(tmp_path: Path) -> None:
    stamp = run_identity.RunStamp("../id", "../../up\x1b/to", "host", 0.0, "")
    assert open_place(f"{tmp_path}/{stamp.folder}").root.parent == tmp_path
