"""Targets that are values: a regression is trained, judged and answered in their units, never taken for classes or for
yes-or-no answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import programs
import pytest
import torch

from espalier import recipe as config
from espalier.graph.data import sources
from espalier.recipe import Data
from espalier.recipe.errors import UserError

RECIPE = """
[model]
kind = "{kind}"
width = 16
dropout = 0.0
[graph]
task = "{task}"
[data]
path = "{path}"
[train]
steps = 30
validate_tokens = 64
precision = "fp32"
[plan]
trial = false
pin.ranks = 1
cluster = "machine.toml"
"""


def load(path, **options):
    return sources.load(Data(path=str(path)), config.GraphOptions(**options))


def trained(folder: Path, path: str, kind: str, task: str) -> str:
    (folder / "machine.toml").write_text(programs.MACHINE)
    (folder / "r.toml").write_text(RECIPE.format(path=path, kind=kind, task=task))
    run = programs.forked(folder, "train", "r.toml", "--run", "run")
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def molecules(folder: Path, labels) -> Path:
    """An OGB folder laid out as ogbg-molesol; `labels` of the sizes of molecules."""
    random = np.random.default_rng(0)
    sizes = random.integers(4, 9, 40)

    def write(name: str, rows, form: str) -> None:
        file = folder / "mol" / f"{name}.csv.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(file, "wt") as opened:
            np.savetxt(opened, rows, fmt=form, delimiter=",")

    write("raw/num-node-list", sizes, "%d")
    write("raw/num-edge-list", sizes - 1, "%d")
    edges = [np.stack([np.arange(size - 1), np.arange(1, size)], 1) for size in sizes]
    write("raw/edge", np.concatenate(edges), "%d")
    write("raw/node-feat", random.normal(size=(sizes.sum(), 3)), "%.4f")
    write("raw/graph-label", labels(sizes), "%.3f")
    for name, part in (("train", range(24)), ("valid", range(24, 32)), ("test", range(32, 40))):
        write(f"split/scaffold/{name}", np.array(part), "%d")
    return folder / "mol"


def test_ogb_regression_trains_on_values_below_zero(tmp_path):
    place = molecules(tmp_path, lambda sizes: -7.9 + 0.37 * sizes[:, None])
    graph = load(place, task="graph")
    sizes = np.diff(graph.starts)
    np.testing.assert_allclose(graph.labels[:, 0], -7.9 + 0.37 * sizes, atol=5e-4)
    text = trained(tmp_path, "mol", "gin", "graph")
    assert "targets: one column of values, a regression" in text
    assert "accuracy" not in text
    (answer,) = json.loads(programs.forked(tmp_path, "predict", "run", "3", "--json").stdout)["answers"]
    assert set(answer) == {"name", "value"}
    assert -9 < answer["value"] < -2


def test_ogb_columns_of_values_and_of_answers_are_told_apart(tmp_path):
    several = load(molecules(tmp_path, lambda sizes: np.stack([sizes - 5.5, -sizes / 3], 1)), task="graph")
    assert (several.kind, several.outputs) == ("values", 2)
    binary = load(molecules(tmp_path, lambda sizes: sizes[:, None] % 2), task="graph")
    assert (binary.kind, binary.outputs) == ("classes", 2)
    holes = load(molecules(tmp_path, lambda sizes: np.where(sizes[:, None] > 6, np.nan, [[0, 1, 1]])), task="graph")
    assert (holes.kind, holes.outputs) == ("tasks", 3)


def prices(folder: Path, **changed) -> Path:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4)).astype(np.float32)
    price = (50 + 10 * x[:, :1] + random.normal(size=(60, 1))).astype(np.float32)
    arrays = {"edge_index": random.integers(0, 60, (2, 180)), "x": x, "y": price, **changed}
    np.savez(folder / "g.npz", **arrays)
    return folder / "g.npz"


def test_regression_npz_is_judged_in_the_units_of_the_prices(tmp_path):
    prices(tmp_path)
    text = trained(tmp_path, "g.npz", "sage", "node")
    assert "targets: one column of values, a regression" in text
    assert "accuracy" not in text
    figures = json.loads(programs.forked(tmp_path, "eval", "run", "--json").stdout)
    assert figures["r2"] <= 1
    assert figures["mse"] >= figures["mae"] ** 2 > 0
    lines = programs.forked(tmp_path, "predict", "run", "0,1").stdout.splitlines()
    assert all(0 < float(line.split("\t")[1]) < 100 for line in lines)
    assert "mae" in (tmp_path / "run" / "report.html").read_text().lower()


@pytest.mark.parametrize("shape", [(60,), (60, 1), (60, 3)])
def test_arrays_of_any_shape_are_values(tmp_path, shape):
    values = np.random.default_rng(1).normal(50, 10, shape)
    graph = load(prices(tmp_path, y=values))
    assert graph.kind == "values"
    np.testing.assert_array_equal(graph.labels, values.reshape(60, -1))


@pytest.mark.parametrize("columns", [1, 19])
def test_lists_of_graphs_with_a_row_of_values_each(tmp_path, columns):
    rows = [torch.randn(1, columns) if columns > 1 else torch.randn(1) for _ in range(6)]
    edges = torch.tensor([[0, 1], [1, 2]])
    torch.save([{"x": torch.ones(3, 2), "edge_index": edges, "y": row} for row in rows], tmp_path / "list.pt")
    graph = load(tmp_path / "list.pt", task="graph")
    assert (graph.kind, graph.outputs) == ("values", columns)
    np.testing.assert_array_equal(graph.labels, torch.cat([row.reshape(1, -1) for row in rows]).double().numpy())


@pytest.mark.parametrize("ids", ["id,", ""])
def test_tables_with_decimals_and_empty_cells_are_values_whatever_else_they_hold(tmp_path, ids):
    (tmp_path / "edges.csv").write_text("source,target\na,b\nb,c\n" if ids else "source,target\n0,1\n1,2\n")
    rows = [("a", "-1.5"), ("b", ""), ("c", "-1")]
    body = "".join(f"{f'{name},' if ids else ''}{label},1\n" for name, label in rows)
    (tmp_path / "nodes.csv").write_text(f"{ids}label,size\n{body}")
    np.testing.assert_array_equal(load(tmp_path).labels, [[-1.5], [np.nan], [-1]])


def test_labels_below_minus_one_are_refused_and_can_be_asked_for_as_values(tmp_path):
    file = prices(tmp_path, y=np.arange(-30, 30))
    with pytest.raises(UserError, match=r'a label is -30(.|\n)*graph.target = "values"'):
        load(file)
    assert load(file, target="values").labels[:, 0].tolist() == list(range(-30, 30))
