"""`espalier init`: a recipe for what lies at a path, that can be used as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import networkx
import numpy as np
import pyarrow as pa
import pytest
import scipy.io
import scipy.sparse
import torch
from PIL import Image
from pyarrow import parquet

from espalier import recipe as config
from espalier.cli import main as cli
from espalier.graph.data import synthetic
from espalier.recipe import defaults, recipe_file
from espalier.train import workload_registry

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


# --- in a base install ---------------------------------------------------------------------------------------------


OPTIONAL = {"datasets", "torch_geometric", "pyarrow", "transformers", "pandas", "pymetis", "peft"}
"""What `pip install espalier-train` does not bring, of what readers might import."""


def written(kind: str) -> str:
    """The path of data in the layout `kind` of docs/data.md, written into this folder."""
    table = pa.table({"source": [0, 1, 2], "target": [1, 2, 0]})
    rows = pa.table({"text": ["some text of a row"] * 8})
    masks = {name: np.arange(6) % 3 == at for at, name in enumerate(("train_mask", "val_mask", "test_mask"))}
    arrays = {"edge_index": np.array([[0, 1, 2, 3], [1, 2, 3, 4]]), "x": np.ones((6, 2), np.float32), **masks}
    arrays["y"] = np.arange(6) % 2
    ring = networkx.cycle_graph(12)
    frames = []
    for at in range(9):
        Image.new("RGB", (8, 8)).save(f"{at}.png")
        pose = [[1, 0, 0, at], [0, 1, 0, 0], [0, 0, 1, 4], [0, 0, 0, 1]]
        frames.append({"file_path": f"{at}.png", "transform_matrix": pose})
    writers = {
        "rows.csv": lambda path: path.write_text(
            "text,url\n" + "".join(f"some words number {at},u\n" for at in range(2000))
        ),
        "rows.parquet": lambda path: parquet.write_table(rows, path),
        "edges.csv": lambda path: path.write_text("source,target\n" + "".join(f"{at},{at + 1}\n" for at in range(12))),
        "edges.parquet": lambda path: parquet.write_table(table, path),
        "g.mtx": lambda path: scipy.io.mmwrite(path, scipy.sparse.eye(12, k=1).tocoo()),
        "g.npz": lambda path: np.savez(path, **arrays),
        "g.pt": lambda path: torch.save({name: torch.from_numpy(value) for name, value in arrays.items()}, path),
        "g.json": lambda path: path.write_text(json.dumps(networkx.node_link_data(ring))),
        "g.graphml": lambda path: networkx.write_graphml(ring, path),
        "g.metis": lambda path: path.write_text(
            "12 12\n" + "".join(f"{(at - 1) % 12 + 1} {(at + 1) % 12 + 1}\n" for at in range(12))
        ),
        "transforms.json": lambda path: path.write_text(json.dumps({"camera_angle_x": 0.6, "frames": frames})),
    }
    if kind in writers:
        writers[kind](Path(kind))
    return kind


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        *((kind, "") for kind in ("rows.csv", "edges.csv", "g.mtx", "g.npz", "g.pt", "g.json", "g.graphml", "g.metis")),
        *((kind, "") for kind in ("transforms.json", "planted:nodes=100", "python:imports")),
        ("rows.parquet", "graph"),
        ("edges.parquet", "graph"),
        ("pyg:Planetoid/Cora", "graph"),
        ("hf:roneneldan/TinyStories", "hub"),
    ],
)
def test_what_init_writes_runs_in_a_base_install_or_names_the_extra(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, extra: str
) -> None:
    path = written(kind)
    for name in [*sys.modules]:
        if name.partition(".")[0] in OPTIONAL:
            monkeypatch.delitem(sys.modules, name)
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)
    code = cli.main(["init", path])
    told = "".join(capsys.readouterr())
    assert (f"pip install 'espalier-train[{extra}]'" in told) == bool(extra), told
    assert code == 0 or extra
    if code == 0 and not extra and kind != "python:imports":
        resolved = workload_registry.settle(recipe_file.load("recipe.toml"), home)
        assert workload_registry.open_workload(resolved) is not None
