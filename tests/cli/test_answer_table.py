"""`predict --out` writes answers as a table: names, the likeliest class, the probability of each class, or values."""

from __future__ import annotations

import builtins
import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
import torch
from tests.graph.conftest import load, made

import espalier
from espalier.cli import answer_table, input_check
from espalier.cli import main as cli
from espalier.graph.data.graph import divided
from espalier.graph.data.pyg import from_many
from espalier.graph.workload import GraphWorkload
from espalier.graph.workload_row import ROW
from espalier.recipe import defaults, recipe_file
from espalier.recipe.errors import UserError
from espalier.train.workload_row import Sampling

NODES = 30
RECIPE = """
[model]
kind = "gcn"
width = 8
[data]
path = "edges.csv"
[train]
steps = 3
validate_tokens = 8
[plan]
trial = false
pin.ranks = 1
cluster = "machine.toml"
"""


def table(folder: Path, label: Any = lambda at: ("red", "a, b")[at % 2], column: str = "label") -> None:
    """A ring of nodes called n0, n1 …"""
    nodes = [f"id,{column},size", *(f'n{at},"{label(at)}",{at / 7}' for at in range(NODES))]
    (folder / "nodes.csv").write_text("\n".join(nodes) + "\n")
    edges = ["source,target", *(f"n{at},n{(at + 1) % NODES}" for at in range(NODES))]
    (folder / "edges.csv").write_text("\n".join(edges) + "\n")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    (folder / "machine.toml").write_text(programs.MACHINE)
    (folder / "r.toml").write_text(RECIPE)
    table(folder)
    run = programs.forked(folder, "train", "r.toml", "--run", "run")
    assert run.returncode == 0, run.stderr
    return folder


def predicted(home: Path, *words: str) -> str:
    done = programs.forked(home, "predict", "run", *words)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_a_table_has_names_and_the_probability_of_each_class_in_every_format(home: Path) -> None:
    said = predicted(home, "--out", "answers.csv")
    assert said == "answers.csv: columns node, label, probability.a, b, probability.red\n"

    with (home / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    asked = json.loads(predicted(home, "--json"))["answers"]
    for row, answer in zip(rows, asked, strict=True):
        assert (row["node"], row["label"]) == (answer["name"], answer["label"])
        chances = [float(row[f"probability.{name}"]) for name in ("a, b", "red")]
        assert sum(chances) == pytest.approx(1, abs=1e-6)
        assert float(row[f"probability.{answer['label']}"]) == answer["probability"] == max(chances)
    told = json.loads(predicted(home, "--out", "answers.jsonl", "--json"))
    assert len(rows) == NODES
    assert (told["columns"], told["step"]) == (list(rows[0]), 3)
    lines = [json.loads(line) for line in (home / "answers.jsonl").read_text().splitlines()]
    assert [{name: str(cell) for name, cell in line.items()} for line in lines] == rows
    parquet = pytest.importorskip("pyarrow.parquet")
    predicted(home, "--out", "answers.parquet")
    assert parquet.read_table(home / "answers.parquet").to_pylist() == lines
    columns = espalier.open(home / "run").predict()
    assert {name: cells.tolist() for name, cells in columns.items()} == {
        name: [line[name] for line in lines] for name in lines[0]
    }
    assert columns["probability.red"].dtype == np.float64
    assert not list(home.glob("*.unfinished*"))


def test_nodes_that_are_named_and_lines_of_standard_input_are_the_rows(home: Path) -> None:
    predicted(home, "n3,n1", "--out", "two.jsonl")
    typed = programs.forked(home, "predict", "run", "-", "--out", "typed.jsonl", typed="n3\n\nn1\n")
    assert typed.returncode == 0, typed.stderr
    lines = (home / "two.jsonl").read_text()
    assert [json.loads(line)["node"] for line in lines.splitlines()] == ["n3", "n1"]
    assert (home / "typed.jsonl").read_text() == lines
    assert espalier.open(home / "run").predict("n3,n1")["node"].tolist() == ["n3", "n1"]
    with pytest.raises(UserError, match="no node 'n99'"):
        espalier.open(home / "run").predict("n99")


def workload_of(graph: Any, **options: Any) -> GraphWorkload:
    recipe = {"model": {"kind": "gcn", "width": 8}, "data": {"path": "made"}, "graph": options}
    return GraphWorkload(defaults.resolve(recipe_file.from_table(recipe))[0], graph)


def rows_of(workload: GraphWorkload, text: str | None = None) -> list[dict[str, Any]]:
    model = workload.build(torch.device("cpu"), torch.float32).eval()
    return list(ROW.rows(workload, model, text, Sampling()))


def test_values_stand_under_the_names_of_their_columns_in_their_units(tmp_path: Path) -> None:
    table(tmp_path, lambda at: 1000.5 + at, "target")
    graph = load(tmp_path / "edges.csv")
    parts = made(NODES).parts
    (row, *_) = rows_of(workload_of(replace(graph, parts=parts)), "n4")
    assert list(row) == ["node", "value.target"]
    assert 900 < row["value.target"] < 1200
    numbers = np.random.default_rng(0).normal(size=(60, 2))
    unnamed = rows_of(workload_of(made(labels=numbers)))
    assert list(unnamed[7]) == ["node", "value.0", "value.1"]
    assert unnamed[7]["node"] == 7
    tasks = rows_of(workload_of(made(labels=numbers > 0)))
    assert list(tasks[7]) == ["node", "probability.0", "probability.1"]


def test_classes_that_are_numbers_and_small_graphs_are_named_by_their_numbers(tmp_path: Path) -> None:
    table(tmp_path, lambda at: at % 3)
    graph = load(tmp_path / "edges.csv")
    row = rows_of(workload_of(replace(graph, parts=made(NODES).parts)), "n4")[0]
    assert list(row) == ["node", "label", "probability.0", "probability.1", "probability.2"]
    assert row["label"] in ("0", "1", "2")
    items = [
        {"x": torch.rand(size, 2), "edge_index": torch.tensor([[0], [1]]), "y": torch.tensor([size % 2])}
        for size in (2, 3, 4, 5, 6)
    ]
    many = divided(from_many(items, origin="list", undirected=True), (0.6, 0.2, 0.2), 0)
    rows = rows_of(workload_of(many, task="graph"))
    assert [row["graph"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows_of(workload_of(many, task="graph"), "3,1")[1] == pytest.approx(rows[1])


def test_links_have_both_ends(tmp_path: Path) -> None:
    (first, second) = rows_of(workload_of(made(), task="link"), "0,1; 2,3")
    assert list(first) == ["source", "target", "probability"]
    assert (second["source"], second["target"]) == (2, 3)
    assert 0 < second["probability"] < 1


def asked(run: Path, *words: str) -> Any:
    return cli.parsed(["predict", str(run), *words])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--out", "x.xlsx"), "x.xlsx is no table that is known.*\n.*.csv, .jsonl, .parquet"),
        (("--out", "answers"), "answers is no table"),
        (("--out", "x.csv", "--chat"), "--out and --chat were both given"),
        (("--out", "x.csv", "--turntable", "y.gif"), "--out and --turntable were both given"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_read(home: Path, words: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        input_check.check(asked(home / "run", *words))


def test_parquet_names_what_to_install(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return inner(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"'pyarrow', which is not installed(.|\n)*espalier-train\[graph\]"):
        input_check.check(asked(home / "run", "--out", "x.parquet"))


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def rows() -> Any:
        yield {"node": 1}
        raise UserError("no more")

    (tmp_path / "x.csv").write_text("before")
    with pytest.raises(UserError, match="no more"):
        answer_table.write(tmp_path / "x.csv", rows())
    assert (tmp_path / "x.csv").read_text() == "before"
    with pytest.raises(UserError, match="there are no answers"):
        answer_table.write(tmp_path / "x.csv", iter(()))
    with pytest.raises(UserError, match="nowhere"):
        answer_table.write(tmp_path / "nowhere" / "x.csv", iter([{"node": 1}]))
