"""A run of somebody else does not run the code that its recipe names; one's own does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espalier.cli import run_trust
from espalier.cli.open_run import load_trained
from espalier.cli.run_trust import Origin
from espalier.recipe import recipe_file
from espalier.recipe.errors import UserError
from espalier.recipe.import_function import KEPT_CODE
from espalier.train import run_folder as runs

CODE = """
from pathlib import Path
Path({mark!r}).touch()
"""
MODULE = {"model": {"kind": "module", "build": "somebodys_module:build"}}
PICKLE = {"model": {"kind": "gcn"}, "data": {"path": "graph.pt"}, "graph": {"pickle": True}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def begun(folder: Path, seal: str, code: Path) -> None:
    """A run folder as somebody hands it out: their code beside it."""
    folder.mkdir()
    runs.RunFolder(folder).recipe.write_text(recipe_file.dump(recipe_file.from_table(MODULE, "test")))
    event = {"event": "run", "time": 0.0, "step": 0, "recipe_folder": str(code), "seal": seal}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")


def test_the_code_of_another_users_run_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, mark = tmp_path / "code", tmp_path / "ran"
    code.mkdir()
    (code / "somebodys_module.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    begun(tmp_path / "run", "0" * 64, code)
    with pytest.raises(UserError, match=r"not begun by you.*\n.*somebodys_module:build.*\n.*--trust"):
        load_trained(str(tmp_path / "run"))
    assert not mark.exists()
    with pytest.raises(UserError, match="somebodys_module has no 'build'"):
        load_trained(str(tmp_path / "run"), trust=True)
    assert mark.exists()


@pytest.mark.parametrize("table", [MODULE, PICKLE])
def test_a_seal_is_good_for_its_code_its_folder_and_its_user(
    tmp_path: Path, cache: Path, table: dict[str, object]
) -> None:
    recipe = recipe_file.from_table(table, "test")
    here = Origin(tmp_path)
    made = run_trust.seal_code(recipe, here)
    run_trust.refuse_code(recipe, here, made, "run", trust=False)
    other = recipe_file.from_table({**MODULE, "model": {"kind": "module", "build": "other:build"}}, "test")
    for given, folder in ((other, here), (recipe, Origin(tmp_path / "elsewhere")), (recipe, Origin(None))):
        with pytest.raises(UserError, match="--trust"):
            run_trust.refuse_code(given, folder, made, "run", trust=False)
        run_trust.refuse_code(given, folder, made, "run", trust=True)
    key = cache / "espalier" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.unlink()
    with pytest.raises(UserError, match="--trust"):
        run_trust.refuse_code(recipe, here, made, "run", trust=False)


def test_a_seal_is_broken_by_a_change_of_the_code_that_the_run_keeps(tmp_path: Path) -> None:
    recipe, kept = recipe_file.from_table(MODULE, "test"), tmp_path / "kept"
    (kept / KEPT_CODE).mkdir(parents=True)
    source = kept / KEPT_CODE / "somebodys_module.py"
    source.write_text("one = 1")
    made = run_trust.seal_code(recipe, Origin(tmp_path, kept))
    run_trust.refuse_code(recipe, Origin(tmp_path, kept), made, "run", trust=False)
    source.write_text("one = 2")
    with pytest.raises(UserError, match="--trust"):
        run_trust.refuse_code(recipe, Origin(tmp_path, kept), made, "run", trust=False)


def test_a_recipe_without_code_needs_no_seal(tmp_path: Path, cache: Path) -> None:
    recipe = recipe_file.from_table({"model": {"kind": "gpt"}}, "test")
    assert run_trust.seal_code(recipe, Origin(tmp_path)) == ""
    run_trust.refuse_code(recipe, Origin(tmp_path), "", "run", trust=False)
    assert not cache.exists()


def test_no_key_can_be_kept_and_there_is_no_seal(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    recipe = recipe_file.from_table(MODULE, "test")
    assert run_trust.seal_code(recipe, Origin(tmp_path)) == ""
    with pytest.raises(UserError, match="--trust"):
        run_trust.refuse_code(recipe, Origin(tmp_path), "", "run", trust=False)
