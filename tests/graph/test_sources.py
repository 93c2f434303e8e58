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
from espalier.recipe import defaults, recipe_file
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


def papers():
    """Papers that cite papers, and the authors who wrote them, as `HeteroData.to_dict()`."""
    draw = torch.Generator().manual_seed(0)
    cites = torch.randint(0, 12, (2, 30), generator=draw)
    return {
        "_global_store": {},
        "author": {"x": torch.ones(2, 1)},
        "paper": {"x": torch.rand(12, 3, generator=draw), "y": torch.arange(12) % 3, "train_mask": torch.ones(12) > 0},
        ("author", "writes", "paper"): {"edge_index": torch.tensor([[0], [1]])},
        ("paper", "cites", "paper"): {"edge_index": cites, "edge_weight": torch.rand(30, generator=draw)},
    }


@pytest.mark.parametrize("form", ["dict", "HeteroData"])
def test_one_relation_of_a_heterogeneous_graph_is_chosen_or_the_graph_is_refused_by_name(tmp_path, form):
    table = papers()
    torch.save(table, tmp_path / "g.pt")
    if form == "HeteroData":
        torch.save(pytest.importorskip("torch_geometric.data").HeteroData(table), tmp_path / "g.pt")
    alone = {**table["paper"], **table["paper", "cites", "paper"]}
    for relation in ("cites", "paper,cites,paper"):
        graph = load(tmp_path / "g.pt", relation=relation)
        same(graph, pyg.from_pyg(alone, undirected=True))
        assert np.array_equal(graph.weights, pyg.from_pyg(alone, undirected=True).weights)
        assert len(graph.parts.train) == 12
    for relation in (None, "writes", "reads"):
        with pytest.raises(UserError, match=r"node types author, paper(.|\n)*author,writes,paper; paper,cites,paper"):
            load(tmp_path / "g.pt", relation=relation)
    with pytest.raises(UserError, match="node types author, paper"):
        pyg.from_pyg(table)


def test_a_relation_of_a_graph_that_has_one_kind_of_edges_is_refused(tmp_path):
    torch.save({"edge_index": torch.tensor([[0], [1]]), "x": torch.ones(2, 1)}, tmp_path / "g.pt")
    with pytest.raises(UserError, match="has one kind of edges"):
        load(tmp_path / "g.pt", relation="cites")
    with pytest.raises(UserError, match=r"graph\.relation = 'cites' is not possible with data.path"):
        load("python:imports", relation="cites")


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, "SparseTensor"])
def test_a_sparse_adjacency_is_edges_from_its_columns_to_its_rows(tmp_path, layout, weighted):
    draw = np.random.default_rng(0)
    dense = torch.from_numpy((draw.random((9, 9)) < 0.3) * (draw.random((9, 9)) if weighted else 1.0)).fill_diagonal_(0)
    rows, columns = dense.nonzero().T
    known = {"x": torch.ones(9, 1), "edge_index": torch.stack([columns, rows])}
    expected = pyg.from_pyg({**known, **({"edge_weight": dense[rows, columns]} if weighted else {})})
    if layout == "SparseTensor":
        matrix = SimpleNamespace(coo=lambda: (rows, columns, dense[rows, columns] if weighted else None))
        graph = pyg.from_pyg({"x": known["x"], "adj_t": matrix})
    else:
        torch.save({"x": known["x"], "adj_t": dense.to_sparse(layout=layout)}, tmp_path / "g.pt")
        graph = load(tmp_path / "g.pt", undirected=False)
    same(graph, expected)
    assert (graph.weights is None) == (not weighted)
    assert not weighted or np.array_equal(graph.weights, expected.weights)
    assert "not used: key 'adj_t'" in "".join(pyg.from_pyg({**known, "adj_t": dense.to_sparse()}).notes)


def test_a_split_of_the_masks_is_chosen_by_its_number(tmp_path):
    splits = 10
    draw = np.random.default_rng(0)
    part = draw.integers(0, 3, (20, splits))
    masks = {name: torch.from_numpy(part == at) for at, name in enumerate(("train_mask", "val_mask"))}
    one = {"test_mask": torch.from_numpy(draw.random(20) < 0)}  # of all splits
    table = {"x": torch.ones(20, 1), "y": torch.arange(20) % 2, "edge_index": torch.tensor([[0], [1]]), **masks, **one}
    torch.save(table, tmp_path / "g.pt")
    np.savez(tmp_path / "g.npz", **{name: tensor.numpy() for name, tensor in table.items()})
    for name in ("g.pt", "g.npz"):
        for split in range(splits):
            graph = load(tmp_path / name, split=split)
            assert graph.parts.train.tolist() == np.flatnonzero(part[:, split] == 0).tolist()
            assert graph.parts.validation.tolist() == np.flatnonzero(part[:, split] == 1).tolist()
            assert not len(graph.parts.test)
            assert f"of {splits} splits: number {split}, counted from 0, is used (graph.split)" in graph.notes[-1]
        first = load(tmp_path / name)
        assert first.fingerprint() == load(tmp_path / name, split=0).fingerprint()
        with pytest.raises(UserError, match=r"graph\.split = 10: the masks of .* are of 10 splits"):
            load(tmp_path / name, split=10)
        assert len(load(tmp_path / name, split="all").splits) == splits
    with pytest.raises(UserError, match="are of 0 splits"):
        load(written_edges(tmp_path), split=0)
    torch.save(
        {**table, "train_mask": masks["train_mask"][:, 0], "val_mask": masks["val_mask"][:, 0]}, tmp_path / "g.pt"
    )
    with pytest.raises(UserError, match=r"are of 1 split\.(.|\n)*leave graph.split out"):
        load(tmp_path / "g.pt", split="all")


def written_edges(folder):
    (folder / "edges.csv").write_text("source,target\n0,1\n1,2\n")
    return folder / "edges.csv"


@pytest.mark.parametrize(("split", "more"), [("all", {"task": "link"}), (-1, {}), (2, {"task": "link"})])
def test_a_split_that_cannot_be_is_refused_with_what_to_do(split, more):
    table = {"model": {"kind": "gcn"}, "data": {"path": "x"}, "graph": {"split": split, **more}}
    with pytest.raises(UserError, match=r"graph.split = .* is not possible(.|\n)*graph.split = 0"):
        defaults.resolve(recipe_file.from_table(table))


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


def test_graphs_that_pyg_has_collated_are_read_as_many(tmp_path):
    sizes = (2, 3, 4)
    items = [
        {
            "x": torch.rand(size, 2),
            "edge_index": torch.tensor([[0, 1], [1, 0]]),
            "edge_attr": torch.rand(2, 3),
            "y": torch.tensor([[at % 2, 1 - at % 2]]),
        }
        for at, size in enumerate(sizes)
    ]
    joined = {name: torch.cat([item[name] for item in items], int(name == "edge_index")) for name in items[0]}
    ends = {"x": torch.tensor([0, 2, 5, 9]), "edge_index": torch.tensor([0, 2, 4, 6]), "y": torch.arange(4)}
    torch.save((joined, {**ends, "edge_attr": ends["edge_index"]}), tmp_path / "g.pt")
    same(load(tmp_path / "g.pt"), pyg.from_many(items, origin="list", undirected=True))
    assert load(tmp_path / "g.pt").starts.tolist() == [0, 2, 5, 9]
    torch.save((joined, {"edge_index": ends["edge_index"]}), tmp_path / "bare.pt")
    with pytest.raises(UserError, match="has neither x nor num_nodes"):
        load(tmp_path / "bare.pt")
    of_nodes = {**joined, "y": torch.arange(9) % 2}
    torch.save((of_nodes, {**ends, "y": ends["x"], "edge_attr": ends["edge_index"]}), tmp_path / "nodes.pt")
    with pytest.raises(UserError, match="one for each node"):
        load(tmp_path / "nodes.pt", task="node")


def test_a_file_of_pyg_of_many_graphs_is_read_as_pyg_reads_it(tmp_path):
    data = pytest.importorskip("torch_geometric.data")
    graphs = [
        data.Data(x=torch.rand(n, 2), edge_index=torch.tensor([[0], [n - 1]]), y=torch.tensor([n % 2]))
        for n in (2, 3, 5)
    ]
    data.InMemoryDataset.save(graphs, str(tmp_path / "data.pt"))
    same(load(tmp_path / "data.pt"), pyg.from_many(graphs, origin="list", undirected=True))


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
