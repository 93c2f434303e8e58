"""Where graphs come from: each form gives the same graph, what is not one is named, and nothing of a file is run."""

from __future__ import annotations

import gzip
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.graph.conftest import load, made

from espalier.graph.data import import_graph, ogb, planetoid, pyg
from espalier.recipe.errors import UserError


def same(left, right):
    assert np.array_equal(left.indptr, right.indptr)
    assert np.array_equal(left.indices, right.indices)
    np.testing.assert_allclose(left.features, right.features, rtol=1e-6)
    assert (left.labels is None) == (right.labels is None)
    if left.labels is not None:
        assert np.array_equal(left.labels, right.labels)


def as_dict(graph):
    edges = np.stack([graph.indices.astype(np.int64), graph.targets()])
    masks = {}
    for (_, ids), name in zip(graph.parts.named(), ("train_mask", "val_mask", "test_mask"), strict=True):
        masks[name] = torch.from_numpy(np.isin(np.arange(graph.nodes), ids))
    return {
        "edge_index": torch.from_numpy(edges),
        "x": torch.from_numpy(graph.features),
        "y": torch.from_numpy(graph.labels),
        **masks,
    }


def test_npz_csv_parquet_and_saved_dicts_give_the_same_graph(tmp_path):
    graph = made()
    table = as_dict(graph)
    np.savez(tmp_path / "g.npz", **{name: value.numpy() for name, value in table.items()})
    torch.save(table, tmp_path / "g.pt")
    pairs = [f"{a},{b}" for a, b in zip(graph.indices, graph.targets(), strict=True)]
    (tmp_path / "edges.csv").write_text("source,target\n" + "\n".join(pairs) + "\n")
    part = np.full(graph.nodes, "", dtype="<U10")
    for name, ids in graph.parts.named():
        part[ids] = name
    rows = [
        ",".join([str(graph.labels[at]), part[at], *(repr(float(one)) for one in graph.features[at])])
        for at in range(graph.nodes)
    ]
    (tmp_path / "nodes.csv").write_text("label,part,a,b,c,d,e\n" + "\n".join(rows) + "\n")
    for name in ("g.npz", "g.pt", "edges.csv", ""):
        found = load(tmp_path / name)
        same(found, graph)
        assert all(
            np.array_equal(a, b) for (_, a), (_, b) in zip(found.parts.named(), graph.parts.named(), strict=True)
        )


def test_parquet_as_csv(tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"source": [0, 1, 2], "target": [1, 2, 0], "weight": [1.0, 2.0, 3.0]})
    parquet.write_table(table, tmp_path / "e.parquet")
    (tmp_path / "e.csv").write_text("source,target,weight\n0,1,1\n1,2,2\n2,0,3\n")
    one, two = (load(tmp_path / name, undirected=False) for name in ("e.parquet", "e.csv"))
    same(one, two)
    assert one.weights.tolist() == two.weights.tolist()


class Trap:
    """Unpickling it would end the test."""

    def __reduce__(self):
        return (pytest.fail, ("code of a pickle ran",))


def test_pickles_are_refused_and_say_why(tmp_path):
    torch.save({"x": Trap()}, tmp_path / "g.pt")
    with pytest.raises(UserError, match="can execute arbitrary code"):
        load(tmp_path / "g.pt")
    (tmp_path / "g.pkl").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match="can execute arbitrary code"):
        load(tmp_path / "g.pkl")
    np.savez(tmp_path / "g.npz", edge_index=np.array([Trap()], object))
    with pytest.raises(UserError, match="can execute arbitrary code"):
        load(tmp_path / "g.npz")
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (tmp_path / f"ind.bad.{part}").write_bytes(pickle.dumps(Trap()) if part != "test.index" else b"1\n")
    with pytest.raises(UserError, match="no array"):
        planetoid.load(tmp_path, "bad", undirected=True)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("python:import", "did you mean python:imports"),
        ("nowhere/at/all", "does not exist"),
        ("rmat:scael=3", "scale"),
        ("planted:nodes=many", "not a number"),
        ("planted:nodes=0", "not possible"),
    ],
)
def test_paths_that_name_no_graph(path, says):
    with pytest.raises(UserError, match=says):
        load(path)


def test_a_folder_without_a_graph_says_what_was_looked_for(tmp_path):
    with pytest.raises(UserError, match=r"looked for ind\.NAME\.graph"):
        load(tmp_path)


def test_pyg_data_goes_there_and_back():
    pytest.importorskip("torch_geometric")
    graph = made(weights=np.arange(240.0) + 1)
    back = pyg.from_pyg(pyg.to_pyg(graph))
    same(back, graph)
    assert np.array_equal(back.weights, graph.weights)
    assert np.array_equal(back.parts.test, graph.parts.test)


def test_saved_data_of_pyg_is_read_without_unpickling(tmp_path):
    pytest.importorskip("torch_geometric")
    data = pyg.to_pyg(made())
    torch.save(data, tmp_path / "one.pt")
    same(load(str(tmp_path / "one.pt")), made())
    data.y = torch.tensor([1])
    torch.save([data, data], tmp_path / "two.pt")
    assert load(str(tmp_path / "two.pt")).items == 2
    data.more = SimpleNamespace()
    torch.save(data, tmp_path / "odd.pt")
    with pytest.raises(UserError, match="is pickled, and is not read"):
        load(str(tmp_path / "odd.pt"))


def test_a_heterogeneous_graph_is_refused_by_name():
    data = SimpleNamespace(edge_types=[("a", "to", "b")], node_types=["author", "paper"])
    with pytest.raises(UserError, match="node types author, paper"):
        pyg.from_pyg(data)


def test_many_small_graphs_from_a_list():
    items = [SimpleNamespace(x=torch.ones(n, 2), edge_index=torch.tensor([[0], [1]]), y=n % 2) for n in (2, 3, 4)]
    for item in items:
        item.y = torch.tensor([item.y])
    graph = pyg.from_many(items, origin="list")
    assert graph.starts.tolist() == [0, 2, 5, 9]
    assert graph.labels.tolist() == [0, 1, 0]
    assert sorted(zip(graph.indices.tolist(), graph.targets().tolist(), strict=True)) == [(0, 1), (2, 3), (5, 6)]
    same(pyg.from_many([vars(item) for item in items], origin="dicts"), graph)


def test_many_small_graphs_keep_what_is_known_of_edges_and_touch_no_other():
    def item(end, **known):
        ends = torch.tensor([[0], [end]])
        return SimpleNamespace(x=torch.ones(2, 2), edge_index=ends, y=torch.tensor([0]), **known)

    known = [{"edge_weight": torch.tensor([one]), "edge_attr": torch.tensor([[one]])} for one in (2.0, 3.0)]
    graph = pyg.from_many([item(1, **one) for one in known], undirected=True, origin="list")
    assert graph.indices.tolist() == [1, 0, 3, 2]
    assert graph.weights.tolist() == graph.edge_features[:, 0].tolist() == [2, 2, 3, 3]
    with pytest.raises(UserError, match="list, item 0 has an edge at 2, outside its 2 nodes"):
        pyg.from_many([item(2), item(1)], origin="list")
    with pytest.raises(UserError, match="list, item 1 lacks"):
        pyg.from_many([item(1, **known[0]), item(1)], origin="list")


def test_a_saved_dict_of_a_heterogeneous_graph_is_refused_by_name(tmp_path):
    table = {"_global_store": {}, "author": {"x": torch.ones(2, 1)}, "paper": {"x": torch.ones(2, 1)}}
    torch.save({**table, ("author", "to", "paper"): {"edge_index": torch.tensor([[0], [1]])}}, tmp_path / "g.pt")
    with pytest.raises(UserError, match="node types author, paper"):
        load(tmp_path / "g.pt")


def test_many_graphs_laid_over_each_other_are_not_one(tmp_path):
    table = {"edge_index": torch.tensor([[0, 0], [1, 1]]), "x": torch.ones(4, 1)}
    torch.save((table, {"edge_index": torch.tensor([0, 1, 2])}), tmp_path / "g.pt")
    with pytest.raises(UserError, match="holds 2 collated graphs"):
        load(tmp_path / "g.pt")


def arrays(folder, **known):
    given = {"edge_index": np.array([[0, 1], [1, 2]]), "x": np.ones((3, 2)), **known}
    np.savez(folder / "g.npz", **{name: one for name, one in given.items() if one is not None})
    return load(folder / "g.npz", undirected=False)


@pytest.mark.parametrize("left", [("train_mask", "test_mask"), ("test_mask",)])
def test_a_mask_left_out_is_empty_and_the_others_hold(tmp_path, left):
    masks = {name: np.arange(3) == at for at, name in enumerate(left)}
    found = arrays(tmp_path, y=np.array([0, 1, 0]), **masks).parts
    expected = {name: [at] for at, name in enumerate(left)}
    assert found.train.tolist() == expected.get("train_mask", [])
    assert found.validation.tolist() == []
    assert found.test.tolist() == expected["test_mask"]
    saved = pyg.from_pyg(
        SimpleNamespace(
            edge_index=torch.tensor([[0], [1]]),
            x=torch.ones(3, 1),
            **{name: torch.from_numpy(one) for name, one in masks.items()},
        )
    )
    assert saved.parts.test.tolist() == expected["test_mask"]


def test_labels_of_arrays(tmp_path):
    tasks = np.array([[0, 1], [1, -1], [1, 0]])
    np.testing.assert_array_equal(arrays(tmp_path, y=tasks).labels, [[0, 1], [1, np.nan], [1, 0]])
    assert arrays(tmp_path, y=np.array([1.0, np.nan, 0.0])).labels.tolist() == [1, -1, 0]
    words = arrays(tmp_path, y=np.array(["b", "", "a"]))
    assert (words.labels.tolist(), words.classes) == ([1, -1, 0], ("a", "b"))
    given = SimpleNamespace(edge_index=torch.tensor([[0], [1]]), x=torch.ones(3, 1))
    given.y = torch.tensor([1.0, float("nan"), 0.0])
    assert pyg.from_pyg(given).labels.tolist() == [1, -1, 0]


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ({"y": np.array([[0, 1], [2, 0], [1, 1]])}, "matrix of 2 columns that holds 2"),
        ({"y": np.array([0, 10**12, 1])}, "A label is 1000000000000"),
        ({"y": np.array([0, 0.5, np.inf])}, "a label is inf"),
        ({"edge_index": np.array([[0, 1], [1, 2], [2, 0]])}, r"shape \[3, 2\], not \[2, edges\](.|\n)*transpose"),
        ({"edge_weight": np.ones((2, 2))}, r"weights have the shape \[2, 2\]"),
    ],
)
def test_arrays_that_cannot_be_are_named(tmp_path, known, says):
    with pytest.raises(UserError, match=says):
        arrays(tmp_path, **known)


def test_weights_in_a_column_are_weights(tmp_path):
    assert arrays(tmp_path, edge_weight=np.array([[2.0], [3.0]])).weights.tolist() == [2, 3]


def test_ogb_folders(tmp_path):
    def write(name, text):
        file = tmp_path / f"{name}.csv.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()))

    write("raw/edge", "0,1\n1,2\n")
    write("raw/num-node-list", "3\n")
    write("raw/node-feat", "1,2\n3,4\n5,6\n")
    write("raw/node-label", "0\n1\n0\n")
    for name, node in (("train", 0), ("valid", 1), ("test", 2)):
        write(f"split/time/{name}", f"{node}\n")
    assert ogb.is_ogb(tmp_path)
    graph = load(tmp_path)
    assert graph.edges == 4
    assert graph.labels.tolist() == [0, 1, 0]
    assert graph.parts.validation.tolist() == [1]
    write("raw/num-node-list", "1\n2\n")
    write("raw/num-edge-list", "0\n2\n")
    write("raw/edge", "0,1\n1,0\n")
    write("raw/graph-label", "1\n0\n")
    for name, item in (("train", 0), ("valid", 1), ("test", 1)):
        write(f"split/time/{name}", f"{item}\n" if name != "test" else "")
    many = ogb.load
    with pytest.warns(UserWarning, match="no data"):
        graph = many(tmp_path, undirected=True)
    assert graph.starts.tolist() == [0, 1, 3]
    assert graph.indices.tolist() == [2, 1]


@pytest.mark.parametrize(("name", "nodes", "edges", "classes"), [("cora", 2708, 10556, 7), ("citeseer", 3327, 9104, 6)])
def test_planetoid_files_as_everybody_counts_them(data_folder, name, nodes, edges, classes):
    graph = load(data_folder / "planetoid" / name)
    assert (graph.nodes, graph.edges, graph.outputs) == (nodes, edges, classes)  # PyG's table of its data sets
    assert [len(ids) for _, ids in graph.parts.named()] == [20 * classes, 500, 1000]
    np.testing.assert_allclose(graph.features.sum(1)[graph.features.sum(1) > 0], 1, rtol=1e-5)


SOURCE = b"""
import os, json as j
from . import beside
from ..up import one, two
from pack.inner import (
    three,
    four as five,
)
  # import commented
x = "import quoted"
"""


def test_imports_are_read_as_python_means_them():
    module = import_graph.SourceModule("pack.sub.mine", "", "pack", False)
    found = set(import_graph._imported(module, SOURCE))
    assert {
        "os",
        "json",
        "pack.sub",
        "pack.sub.beside",
        "pack.up",
        "pack.up.one",
        "pack.inner",
        "pack.inner.four",
    } <= found
    assert "commented" not in found
    package = import_graph.SourceModule("pack.sub", "", "pack", True)
    assert "pack.sub.beside" in set(import_graph._imported(package, SOURCE))


def test_this_machine_has_an_import_graph(tmp_path, monkeypatch):
    site, library = tmp_path / "site", tmp_path / "library"
    for at, folder in enumerate((site / "alpha", library / "json")):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("from . import part\n")
        for name in ["part", *(f"m{one}" for one in range(import_graph.FEWEST))]:
            (folder / f"{name}.py").write_text(f"import json\nimport alpha.part\nword{at} = {at}\n")
    info = site / "alpha-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: alpha\nVersion: 1\n")
    (info / "RECORD").write_text("alpha/__init__.py,,\nalpha/part.py,,\n")
    paths = {"stdlib": str(library), "purelib": str(site), "platlib": str(site)}
    monkeypatch.setattr(import_graph.sysconfig, "get_paths", lambda: paths)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    graph, again = import_graph.load(), import_graph.load()
    assert graph.classes == ("alpha", "python")
    assert graph.called(graph.find("alpha.part")) == "alpha.part"
    near = graph.indices[graph.indptr[graph.find("alpha.part")] :][:3]
    assert len(near) == 3
    assert graph.fingerprint() == again.fingerprint()
    assert np.allclose(np.linalg.norm(graph.features, axis=1), 1, atol=1e-5)
