"""`espalier init`: a recipe for what lies at a path, that can be used as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espalier import recipe as config
from espalier.cli import main as cli
from espalier.graph.data import synthetic
from espalier.recipe import defaults, recipe_file

MINE = Path(__file__).parents[2] / "examples" / "mine.py"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "one.txt").write_text("text of some kind\n" * 20)
    (tmp_path / "mine.py").write_text(MINE.read_text())
    (tmp_path / "links.csv").write_text("source,target\n0,1\n1,2\n")
    (tmp_path / "prices.csv").write_text("day,price\n1,2\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"")
    (tmp_path / "base.gguf").write_bytes(b"GGUF")
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "one.jsonl").write_text(json.dumps(chat) + "\n")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "b"}) + "\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text("")
    (tmp_path / "none.py").write_text("def make():\n    pass\n")
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "kind", "data"),
    [
        (["corpus"], config.Gpt, ["corpus"]),
        (["corpus/one.txt", "python:stdlib"], config.Gpt, ["corpus/one.txt", "python:stdlib"]),
        (["mine.py"], config.Module, None),
        (["links.csv"], config.Sage, ["links.csv"]),
        (["planted:nodes=100"], config.Sage, ["planted:nodes=100"]),
        (["llama", "corpus"], config.Gpt, ["corpus"]),
        (["llama"], config.Gpt, ["python:stdlib"]),
        (["rows.jsonl"], config.Gpt, ["rows.jsonl"]),
        (["chats"], config.Gpt, ["chats"]),
        (["base.gguf", "chats/one.jsonl"], config.Gpt, ["chats/one.jsonl"]),
        (["llama", "pairs.jsonl"], config.Gpt, ["pairs.jsonl"]),
    ],
)
def test_the_recipe_of_a_path_can_be_used(home: Path, paths: list[str], kind: type, data: list[str] | None) -> None:
    assert cli.main(["init", *paths]) == 0
    made = recipe_file.load("recipe.toml", [])
    assert isinstance(made.model, kind)
    tuned = {"chats": "full", "one": "full", "pairs": "dpo"}.get(Path(paths[-1]).stem)
    assert (made.tune and made.tune.__struct_config__.tag) == tuned
    if paths[0] in ("llama", "base.gguf"):
        assert getattr(made.model, "initial", None) == paths[0]
    else:
        defaults.resolve(made)
    if data is not None:
        assert [one.path for one in made.data] == data


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["nothing"], "There is nothing at nothing"),
        (["empty"], "holds no files"),
        (["prices.csv"], "source and target"),
        (["none.py"], "it has make"),
        (["corpus", "links.csv"], "no one recipe"),
        (["llama", "links.csv"], "no one recipe"),
        (["llama", "llama", "corpus"], "leave the others out"),
        ([str(MINE)], "--out"),
        (["run"], "espalier export run --to hf, then espalier init run/export-hf"),
        (["pairs.jsonl"], "espalier init WEIGHTS pairs.jsonl"),
        (["llama", "base.gguf", "chats"], "one folder of weights"),
    ],
)
def test_what_has_no_recipe_is_refused(
    home: Path, paths: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", *paths]) == 2
    assert says in capsys.readouterr().err
    assert not (home / "recipe.toml").exists()


def test_arguments_without_a_default_are_asked_for(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "made.py").write_text("def build(width, depth=2, *, rate, seed=0):\n    pass\n")
    assert cli.main(["init", "made.py"]) == 0
    made = recipe_file.load("recipe.toml", [])
    assert isinstance(made.model, config.Module)
    assert made.model.arguments == {"width": 0, "rate": 0}
    assert "`build` has no default for width, rate" in capsys.readouterr().out


def test_a_recipe_that_exists_stays(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "recipe.toml").write_text("mine")
    assert cli.main(["init", "corpus"]) == 2
    assert "--out recipe-2.toml" in capsys.readouterr().err
    assert (home / "recipe.toml").read_text() == "mine"
    assert cli.main(["init", "corpus", "--out", "recipe-2.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "recipe-2.toml"


def test_names_of_generated_graphs_are_all_known() -> None:
    from espalier.cli import init

    assert {f"{kind}:" for kind in synthetic.KINDS} <= set(init.GRAPHS)
