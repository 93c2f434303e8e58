"""Graphs as other programs write them: the same graph however a table is written, and what is refused or named."""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier import recipe as config
from espalier.graph.data import edge_lists, pyg, sources
from espalier.graph.data.graph import Graph, relabelled
from espalier.graph.tasks import link_prediction
from espalier.recipe import Data
from espalier.recipe.errors import UserError

NODES = ["id,label,f0,f1", "16,c0,1.5,0.25", "27,c1,0.5,-1.75", "20,c2,-0.125,3", "9,c0,2,2"]
EDGES = ["source,target,weight", "16,27,2", "27,20,0.5", "9,16,1", "20,9,3"]


def load(path: Path, **options: Any) -> Graph:
    """The graph at `path`, with settings of `[graph]`."""
    return sources.load(Data(path=str(path)), config.GraphOptions(**options))


def written(folder: Path, edges: list[str], nodes: list[str] | None = None, name: str = "edges.csv") -> Path:
    """A folder with a table of edges, and one of nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(edges) + "\n")
    if nodes is not None:
        (folder / "nodes.csv").write_text("\n".join(nodes) + "\n")
    return folder


def same(left: Graph, right: Graph) -> None:
    """Both graphs are equal, bit for bit."""
    for name in ("indptr", "indices", "features", "labels", "weights", "edge_features"):
        one, other = getattr(left, name), getattr(right, name)
        assert (one is None) == (other is None), name
        assert one is None or (one.dtype == other.dtype and np.array_equal(one, other)), name
    assert (left.parts is None) == (right.parts is None)
    if left.parts is not None and right.parts is not None:
        for (_, ids), (_, others) in zip(left.parts.named(), right.parts.named(), strict=True):
            assert np.array_equal(ids, others)
    assert (left.classes, list(left.names), left.columns) == (right.classes, list(right.names), right.columns)


def joined(rows: list[str], separator: str) -> list[str]:
    return [row.replace(",", separator) for row in rows]


# --- how a table is written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [";", "\t", "|", " ", "  \t"])
def test_any_separator_gives_the_same_graph_and_is_said(tmp_path: Path, separator: str) -> None:
    plain = load(written(tmp_path / "plain", EDGES, NODES))
    other = load(written(tmp_path / "other", joined(EDGES, separator), joined(NODES, separator)))
    same(plain, other)
    assert plain.notes == ()
    assert sum("is separated by" in note for note in other.notes) == 2


@pytest.mark.parametrize("form", ["mark", "crlf", "quoted", "gzip", "upper case", "comments", "sep="])
def test_any_form_of_text_gives_the_same_graph(tmp_path: Path, form: str) -> None:
    plain = load(written(tmp_path / "plain", EDGES, NODES))
    folder = tmp_path / "other"
    folder.mkdir()
    for name, rows in (("edges.csv", EDGES), ("nodes.csv", NODES)):
        text = "\n".join(rows) + "\n"
        if form == "quoted":
            text = "\n".join(",".join(f'"{cell}"' for cell in row.split(",")) for row in rows)
        if form == "comments":
            text = f"# Nodes: 4 Edges: 4\n% more\n\n{text}"
        content = text.replace("\n", "\r\n" if form == "crlf" else "\n").encode()
        if form == "mark":
            content = b"\xef\xbb\xbf" + content
        if form == "sep=":
            content = b"sep=;\r\n" + content.replace(b",", b";")
        if form == "gzip":
            content = gzip.compress(content)
        written_as = {"gzip": f"{name}.gz", "upper case": name.upper()}
        (folder / written_as.get(form, name)).write_bytes(content)
    same(plain, load(folder))


def test_an_edge_list_of_snap_is_read_by_its_comment(tmp_path: Path) -> None:
    (tmp_path / "web.TXT").write_text("# Directed graph\n# FromNodeId\tToNodeId\n0\t1\n1\t2\n")
    graph = load(tmp_path / "web.TXT", undirected=False)
    assert (graph.indices.tolist(), graph.targets().tolist()) == ([0, 1], [1, 2])
    assert any("comment" in note for note in graph.notes)


def test_a_long_cell_is_refused_with_its_line(tmp_path: Path) -> None:
    written(tmp_path, ["source,target", "0,1", "a" * 200_000 + ",1"])
    with pytest.raises(UserError, match=r"edges\.csv, line 3: field larger"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["source,target", "0,1", "1,2,3"], "line 3 has 3 cells"),
        (["source,target", "0,1", "\xff"], "is not a table: line 3 has 1 cell"),
        (["source,source", "0,1"], "has the columns 'source' and 'source'|has two columns 'source'"),
        (["a;b,c;d", "e;f,g;h"], "can be read with commas and with semicolons"),
        (["1;2,5", "2;3,5"], "ends of edges"),
        (["# only", "# comments"], "is empty"),
        (["source", "1"], "1 column|other end"),
        (["source,dest,dst", "0,1,1"], "each could be the target"),
        (["source,weight", "0,1"], "none for the other end"),
        (["source,target,edge_type", "0,1,2"], "the column 'edge_type'"),
        (["0 1 {'weight': 3}", "1 2 {'weight': 4}"], "attributes of edges as Python writes them"),
        (["source,target,weight", "0,1,high"], "weights are words, such as 'high'"),
        (["source,target,weight", "0,1,high", "1,2,3"], "weights must be numbers, and one is 'high'"),
    ],
)
def test_a_table_that_cannot_be_understood_is_refused_with_the_reason(
    tmp_path: Path, rows: list[str], reason: str
) -> None:
    written(tmp_path, rows)
    with pytest.raises(UserError, match=reason) as raised:
        load(tmp_path)
    assert raised.value.do


def test_decimal_commas_are_understood_where_they_can_be_nothing_else(tmp_path: Path) -> None:
    edges, nodes = joined(EDGES, ";"), [row.replace(".", ",") for row in joined(NODES, ";")]
    graph = load(written(tmp_path, edges, nodes))
    same(graph, load(written(tmp_path / "plain", EDGES, NODES)))
    assert any("decimal commas" in note for note in graph.notes)
    written(tmp_path, joined(EDGES, ";"), ["id;f0", "16;1,500", "27;2,500", "20;3,250", "9;1"])
    with pytest.raises(UserError, match="decimals or thousands"):
        load(tmp_path)


# --- headers ---------------------------------------------------------------------------------------------------------


def test_an_edge_is_no_header_where_its_ends_are_ids(tmp_path: Path) -> None:
    nodes = ["id,f", "n1,1", "n2,2", "n3,3"]
    graph = load(written(tmp_path, ["n1,n2", "n2,n3"], nodes), undirected=False)
    assert graph.edges == 2
    assert any("has no header" in note for note in graph.notes)
    networkx = written(tmp_path / "networkx", ["0 1 {}", "1 2 {}"], name="g.edgelist")
    assert load(networkx / "g.edgelist", undirected=False).edges == 2
    same(graph, load(written(tmp_path, ["von,nach", "n1,n2", "n2,n3"], nodes), undirected=False))
    with pytest.raises(UserError, match="zoe, which is no id"):
        load(written(tmp_path, ["n1,zoe", "n2,n3"], nodes))
    with pytest.raises(UserError, match="may be an edge or a header"):
        load(written(tmp_path, ["from,to", "to,from"], ["id,f", "from,1", "to,2"]))


def test_a_first_row_that_may_be_either_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="may name columns or not"):
        load(written(tmp_path, ["ann,bob", "bob,eve"]))
    with pytest.raises(UserError, match="may name columns or not"):
        load(written(tmp_path, EDGES, ["n1,c0,x", "n2,c1,y"]))


# --- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["id", "node_id", "nodeId", "Id", "ID", "node", "name", "index", "Unnamed: 0", ""])
def test_ids_by_any_of_their_names_are_no_feature(tmp_path: Path, name: str) -> None:
    plain = load(written(tmp_path / "plain", EDGES, NODES))
    graph = load(written(tmp_path, EDGES, [NODES[0].replace("id", name, 1), *NODES[1:]]))
    same(plain, graph)
    assert (name == "id") == (not graph.notes)


@pytest.mark.parametrize(
    "ends", ["src,dst", "from,to", "head,tail", "u,v", "Source,Target", "node1,node2", "source,dst", "node_1,node_2"]
)
def test_ends_by_any_of_their_names_are_said(tmp_path: Path, ends: str) -> None:
    plain = load(written(tmp_path / "plain", EDGES, NODES), undirected=False)
    graph = load(written(tmp_path, [f"{ends},Weight", *EDGES[1:]], NODES), undirected=False)
    same(plain, graph)
    assert any("is the target" in note and "'Weight' is the weight" in note for note in graph.notes)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_order_synonyms_and_unused_columns_do_not_matter(tmp_path: Path, data: st.DataObject) -> None:
    synonyms = {
        "id": ["id", "node_id", "Id"],
        "label": ["label", "class", "y", "target"],
        "part": ["part", "split"],
        "source": ["source", "src", "from"],
        "target": ["target", "dst", "to"],
        "weight": ["weight", "edge_weight", "Weights"],
    }
    nodes = {
        "id": ["16", "27", "20", "9"],
        "label": ["c0", "c1", "c2", "c0"],
        "part": ["train", "val", "test", ""],
        "f0": ["1.5", "0.5", "-0.125", "2"],
    }
    edges = dict(
        zip(["source", "target", "weight"], zip(*(row.split(",") for row in EDGES[1:]), strict=True), strict=True)
    )

    def table(columns: dict[str, Any], renamed: bool, extra: str) -> list[str]:
        names = [
            data.draw(st.sampled_from(synonyms[name])) if renamed and name in synonyms else name for name in columns
        ]
        cells = [*columns.values()]
        if extra:
            names, cells = [*names, extra], [*cells, [f"word {at}" for at in range(4)]]
        order = data.draw(st.permutations(range(len(names)))) if renamed else range(len(names))
        return [",".join([names[at] for at in order]), *(",".join(cells[at][row] for at in order) for row in range(4))]

    def graph(renamed: bool) -> Graph:
        extra = data.draw(st.sampled_from(["", "title"])) if renamed else ""
        return load(written(tmp_path / str(renamed), table(edges, renamed, extra), table(nodes, renamed, extra)))

    found = graph(True)
    same(graph(False), found)
    assert all("title" in note for note in found.notes if note.startswith("not used"))


def test_rows_of_nodes_with_ids_may_come_in_any_order(tmp_path: Path) -> None:
    plain = load(written(tmp_path / "plain", EDGES, NODES))
    other = load(written(tmp_path, EDGES, [NODES[0], *NODES[:0:-1]]))
    same(relabelled(plain, np.arange(4)[::-1]), other)


def test_the_index_of_pandas_is_left_out_and_said(tmp_path: Path) -> None:
    def indexed(rows: list[str]) -> list[str]:
        return [f",{rows[0]}", *(f"{at},{row}" for at, row in enumerate(rows[1:]))]

    graph = load(written(tmp_path, indexed(EDGES), indexed(NODES)))
    same(load(written(tmp_path / "plain", EDGES, NODES)), graph)
    assert sum(note.startswith("not used: column ''") for note in graph.notes) == 2
    rows = [",f0", "0,5", "1,6", "2,7"]
    graph = load(written(tmp_path / "rows", ["source,target", "0,1", "1,2"], rows))
    assert (graph.columns, list(graph.names)) == (("f0",), [])
    assert any("counts the rows" in note for note in graph.notes)


def test_a_first_column_that_may_be_ids_is_never_a_feature_without_a_word(tmp_path: Path) -> None:
    rows = ["number,f0", "2,1", "0,2", "1,3"]
    with pytest.raises(UserError, match="'number' may be it"):
        load(written(tmp_path, ["source,target", "0,1", "1,2"], rows))
    rows = ["number,f0", "12,1", "10,2", "11,3"]
    graph = load(written(tmp_path, ["source,target", "10,11"], rows), undirected=False)
    assert (graph.columns, list(graph.names)) == (("f0",), ["12", "10", "11"])
    assert any("'number' is the id" in note for note in graph.notes)
    graph = load(written(tmp_path, ["source,target", "0,1"], rows))
    assert graph.columns == ("number", "f0")
    assert any("'number' of nodes.csv is a feature" in note for note in graph.notes)


def test_two_columns_that_could_be_meant_are_refused(tmp_path: Path) -> None:
    for name in ("node_id", "class"):
        rows = [f"{row},{at if at else name}" for at, row in enumerate(NODES)]
        with pytest.raises(UserError, match="each could be the"):
            load(written(tmp_path, EDGES, rows))


def test_words_are_texts_and_words_among_numbers_refused(tmp_path: Path) -> None:
    rows = ["id,town,age,born", "16,Ulm,1,", "27,Bonn,2,", "20,Ulm,3,", "9,Ulm,4,"]
    graph = load(written(tmp_path, EDGES, rows))
    assert graph.columns == ("age",)
    assert graph.texts["town"].tolist() == ["Ulm", "Bonn", "Ulm", "Ulm"]
    assert "not used: column 'born' (of nodes.csv, no values)" in graph.notes
    with pytest.raises(UserError, match="the feature 'age' of nodes must be numbers, and one is 'old'"):
        load(written(tmp_path, EDGES, [*rows[:-1], "9,Ulm,old,"]))
    with pytest.raises(UserError, match="first in row 3, column 'age'"):
        load(written(tmp_path, EDGES, [*rows[:-1], "9,Ulm,nan,"]))


def test_truth_values_are_features(tmp_path: Path) -> None:
    rows = ["id,tall", "16,True", "27,False", "20,False", "9,True"]
    assert load(written(tmp_path, EDGES, rows)).features[:, 0].tolist() == [1, 0, 0, 1]


def test_parts_by_words_and_by_masks(tmp_path: Path) -> None:
    words = ["id,split", "16,Training", "27,dev", "20,valid", "9,"]
    graph = load(written(tmp_path, EDGES, words))
    assert graph.parts is not None
    assert [ids.tolist() for _, ids in graph.parts.named()] == [[0], [1, 2], []]
    masks = ["id,train_mask,val_mask,test_mask", "16,True,False,0", "27,0,1,False", "20,,1,", "9,False,False,1.0"]
    graph = load(written(tmp_path, EDGES, masks))
    assert graph.parts is not None
    assert [ids.tolist() for _, ids in graph.parts.named()] == [[0], [1, 2], [3]]
    with pytest.raises(UserError, match="part = '1' is not possible"):
        load(written(tmp_path, EDGES, ["id,part", "16,train", "27,1", "20,test", "9,"]))


def test_tables_of_gephi(tmp_path: Path) -> None:
    edges = ["Source,Target,Type,Id,Label,Weight", "16,27,Directed,0,,2", "27,20,Directed,1,,0.5", "9,16,Directed,2,,1"]
    nodes = ["Id,Label,f0", "16,Ann,1", "27,Bob,2", "20,Eve,3", "9,Zoe,4"]
    graph = load(written(tmp_path, edges, nodes), undirected=False)
    assert list(zip(graph.indices.tolist(), graph.targets().tolist(), strict=True)) == [(3, 0), (0, 1), (1, 2)]
    assert graph.weights is not None
    assert graph.weights.tolist() == [1, 2, 0.5]
    assert (graph.labels, graph.edge_features) == (None, None)
    assert any("'Label'" in note and "a name for each node" in note for note in graph.notes)
    assert any("called directed are read both ways" in note for note in load(tmp_path).notes)
    undirected = [row.replace("Directed", "Undirected") for row in edges]
    same(load(tmp_path), load(written(tmp_path, undirected, nodes), undirected=False))
    with pytest.raises(UserError, match="directed and undirected edges"):
        load(written(tmp_path, [*undirected, "9,20,Directed,3,,1"], nodes), undirected=False)


# --- ids and labels --------------------------------------------------------------------------------------------------


def test_an_end_far_above_the_number_of_edges_is_refused(tmp_path: Path) -> None:
    ends = np.array([[0, 1, 2], [1, 2, 1_000_000_000]])
    np.savez(tmp_path / "g.npz", edge_index=ends)
    written(tmp_path, ["source,target", "0,1", "1,2", "2,1000000000"])
    for name in ("edges.csv", "g.npz"):
        with pytest.raises(UserError, match=r"edge at 1000000000(.|\n)*without a table of nodes"):
            load(tmp_path / name)


def test_labels_below_none_are_refused_and_a_sole_class_is_said(tmp_path: Path) -> None:
    known = {"edge_index": np.array([[0, 1], [1, 2]]), "x": np.ones((4, 2))}
    np.savez(tmp_path / "g.npz", **known, y=np.array([-1, 1, 1, -1]))
    missing, sole = load(tmp_path / "g.npz").notes
    assert missing == "2 of 4 nodes have no label"
    assert "all 2 labels are of the class 1; -1 means that there is none" in sole
    np.savez(tmp_path / "g.npz", **known, y=np.array([-2, 1, 1, -1]))
    with pytest.raises(UserError, match="a label is -2"):
        load(tmp_path / "g.npz")


# --- other formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetry", ["general", "symmetric"])
@pytest.mark.parametrize("field", ["real", "pattern"])
@pytest.mark.parametrize("packed", [False, True])
def test_matrices_are_graphs(tmp_path: Path, symmetry: str, field: str, packed: bool) -> None:
    dense = np.array(
        [[0, 2.0, 0], [2, 0, 0.5], [0, 0.5, 0]] if symmetry == "symmetric" else [[0, 2.0, 0], [0, 0, 0.5], [0, 0, 0]]
    )
    file = tmp_path / "A.MTX"
    scipy.io.mmwrite(str(tmp_path / "a.mtx"), scipy.sparse.coo_array(dense), field=field, symmetry=symmetry)
    content = (tmp_path / "a.mtx").read_bytes()
    file = tmp_path / ("b.mtx.gz" if packed else "A.MTX")
    file.write_bytes(gzip.compress(content) if packed else content)
    graph = load(file, undirected=False)
    expected = scipy.sparse.coo_array(dense.T)
    order = np.lexsort((expected.coords[1], expected.coords[0]))
    assert graph.nodes == 3
    assert graph.indices.tolist() == expected.coords[1][order].tolist()
    assert graph.targets().tolist() == expected.coords[0][order].tolist()
    if field == "real":
        assert graph.weights is not None
        assert graph.weights.tolist() == expected.data[order].tolist()
    else:
        assert graph.weights is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("%%MatrixMarket matrix array real general\n2 2\n1\n0\n0\n1\n", "is array"),
        ("%%MatrixMarket matrix coordinate complex general\n2 2 1\n1 2 1 0\n", "is complex"),
        ("%%MatrixMarket matrix coordinate real general\n2 3 1\n1 2 1\n", "2 rows and 3 columns"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 9999999999\n1 2 1\n", "too short"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 2\n1 2 1\n", "cannot be read"),
        ("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 3 1\n", "cannot be read"),
        ("hello", "cannot be read"),
    ],
)
def test_matrices_that_are_no_graph_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "a.mtx").write_text(content)
    with pytest.raises(UserError, match=reason):
        load(tmp_path / "a.mtx")


def test_keys_are_understood_named_or_refused(tmp_path: Path) -> None:
    ends, features = np.array([[0, 1], [1, 2]]), np.arange(6.0).reshape(3, 2)
    np.savez(tmp_path / "g.npz", edge_index=ends, feat=features, label=np.array([0, 1, 0]), pos=np.ones((3, 2)))
    graph = load(tmp_path / "g.npz")
    assert graph.features.tolist() == features.tolist()
    assert graph.notes == ("not used: key 'pos' (176 B)",)
    torch.save({"edge_index": torch.tensor(ends), "x": torch.ones(3, 2), "pos": torch.ones(3)}, tmp_path / "g.pt")
    assert any("not used: key 'pos'" in note for note in load(tmp_path / "g.pt").notes)
    for key in ("edge_type", "batch", "node_type", "edge_label_index"):
        table = {"edge_index": ends, "x": features, key: np.zeros(2, np.int64)}
        np.savez(tmp_path / "g.npz", **table)
        torch.save({name: torch.tensor(value) for name, value in table.items()}, tmp_path / "g.pt")
        for name in ("g.npz", "g.pt"):
            with pytest.raises(UserError, match=f"the key '{key}', which is not understood"):
                load(tmp_path / name)
    with pytest.raises(UserError, match="keys x and features"):
        pyg.from_pyg(SimpleNamespace(edge_index=torch.tensor(ends), x=torch.ones(3, 2), features=torch.ones(3)))


@pytest.mark.parametrize("values", [np.ones((3, 2), complex), np.array([["a", "b"]] * 3), np.zeros((3, 2), "M8[s]")])
def test_arrays_of_another_kind_are_refused(tmp_path: Path, values: np.ndarray) -> None:
    np.savez(tmp_path / "g.npz", edge_index=np.array([[0, 1], [1, 2]]), x=values)
    with pytest.raises(UserError, match=r"key 'x' holds .*, not numbers"):
        load(tmp_path / "g.npz")
    if values.dtype.kind == "c":
        torch.save({"edge_index": torch.tensor([[0, 1], [1, 2]]), "x": torch.tensor(values)}, tmp_path / "g.pt")
        with pytest.raises(UserError, match="'x' holds complex numbers"):
            load(tmp_path / "g.pt")


# --- OGB's links -----------------------------------------------------------------------------------------------------


def ogb_links(folder: Path, parts: dict[str, Any], form: str) -> np.ndarray:
    """A link set as ogbl-collab is laid out; returns all links."""
    raw, split = folder / "raw", folder / "split" / "time"
    for place in (raw, split):
        place.mkdir(parents=True)

    def write(file: Path, rows: Any, kind: str = "%d") -> None:
        text = io.StringIO()
        np.savetxt(text, rows, fmt=kind, delimiter=",")
        file.write_bytes(gzip.compress(text.getvalue().encode()))

    write(raw / "num-node-list.csv.gz", [12])
    write(raw / "num-edge-list.csv.gz", [len(parts["train"])])
    write(raw / "edge.csv.gz", parts["train"])
    write(raw / "node-feat.csv.gz", np.arange(24.0).reshape(12, 2), "%.2f")
    write(raw / "edge_year.csv.gz", np.ones(len(parts["train"])))
    for name, links in parts.items():
        table = {"edge": links, "edge_neg": links[:1]}
        if form == "csv":
            write(split / f"{name}.csv.gz", links)
        elif form == "tensors":
            torch.save({key: torch.tensor(value) for key, value in table.items()}, split / f"{name}.pt")
        else:  # as OGB's own files are
            torch.save(table, split / f"{name}.pt", _use_new_zipfile_serialization=form == "arrays")
    return np.concatenate(list(parts.values()))


@pytest.mark.parametrize("form", ["csv", "tensors", "arrays", "old arrays"])
def test_the_split_of_a_link_set_of_ogb_is_used(tmp_path: Path, form: str) -> None:
    cycle = np.array([[at, (at + 1) % 12] for at in range(12)])
    parts = {"train": cycle[:8], "valid": cycle[8:10], "test": cycle[10:]}
    ogb_links(tmp_path, parts, form)
    graph = load(tmp_path, task="link")
    assert graph.edges == 24
    assert "not used: file 'edge_year.csv.gz'" in graph.notes
    assert form == "csv" or any("'edge_neg'" in note for note in graph.notes)
    for placed in (graph, relabelled(graph, np.arange(12)[::-1])):
        links = link_prediction.split(placed, (0.5, 0.25, 0.25), 0)
        for (_, ids), expected in zip(links.parts.named(), parts.values(), strict=True):
            pairs = links.pairs[:, ids] if placed is graph else 11 - links.pairs[:, ids]
            assert {frozenset(pair) for pair in pairs.T.tolist()} == {frozenset(pair) for pair in expected.tolist()}
        assert links.rest.edges == 16
    with pytest.raises(UserError, match="has no labels") as raised:
        load(tmp_path)
    assert raised.value.do == 'graph.task = "link"'


def test_a_split_whose_parts_are_the_same_links_is_left_out_and_said(tmp_path: Path) -> None:
    cycle = np.array([[at, (at + 1) % 12] for at in range(12)])
    ogb_links(tmp_path, {"train": cycle, "valid": cycle, "test": cycle}, "tensors")
    graph = load(tmp_path, task="link")
    assert (graph.edges, graph.link_parts) == (24, None)
    assert any(note.startswith("not used: split 'time'") for note in graph.notes)


def test_a_heterogeneous_set_of_ogb_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "triplet-type-list.csv.gz").write_bytes(gzip.compress(b"a,b,c\n"))
    with pytest.raises(UserError, match="is a heterogeneous graph of OGB"):
        load(tmp_path)


# --- damaged and hostile files ---------------------------------------------------------------------------------------


class Lies:
    """Pickles as a call of NumPy's array on a buffer."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return np.ndarray, self.arguments


def planetoid(folder: Path, **other: Any) -> None:
    """The eight files of a data set, some of them others."""
    random = np.random.default_rng(0)
    x = scipy.sparse.csr_matrix((random.random((520, 4)) > 0.5).astype(np.float32))
    y = np.eye(3)[random.integers(0, 3, 520)]
    parts: dict[str, Any] = {"allx": x, "tx": x[:10], "x": x[:10], "ally": y, "ty": y[:10], "y": y[:10]}
    parts["graph"] = {at: [(at + 1) % 530, (at + 7) % 530] for at in range(530)}
    for part, value in (parts | other).items():
        (folder / f"ind.cora.{part}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / "ind.cora.test.index").write_text("\n".join(map(str, range(520, 530))))


@pytest.mark.parametrize(
    "ally",
    [
        Lies((520, 3), "O", b"A" * 12480),
        Lies((520, 3), "f8", b"A" * 12480),
        np.full((520, 3), None),
        np.zeros((520, 3), complex),
        np.zeros((520, 3), [("a", "f8")]),
        [1, 2],
        print,
        np.ones((520, 3)),
    ],
    ids=["pointers", "buffer", "objects", "complex", "fields", "list", "function", "several classes"],
)
def test_files_of_planetoid_hold_arrays_of_numbers_or_are_refused(tmp_path: Path, ally: Any) -> None:
    planetoid(tmp_path)
    assert load(tmp_path).nodes == 530
    planetoid(tmp_path, ally=ally)
    with pytest.raises(UserError, match=r"ind\.cora") as raised:
        load(tmp_path)
    assert raised.value.do


DAMAGED = ["g.npz", "g.pt", "g.mtx", "e.csv.gz", "csv/edges.csv", "csv/nodes.csv"]
DAMAGED += ["planetoid/ind.cora.allx", "planetoid/ind.cora.graph", "ogb/split/time/test.pt", "ogb/raw/edge.csv.gz"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each format."""
    folder = tmp_path_factory.mktemp("files")
    written(folder / "csv", EDGES, NODES)
    ends = np.array([[0, 1, 2], [1, 2, 0]])
    np.savez(folder / "g.npz", edge_index=ends, x=np.ones((3, 2)), y=np.array([0, 1, 0]))
    torch.save({"edge_index": torch.tensor(ends), "x": torch.ones(3, 2)}, folder / "g.pt")
    scipy.io.mmwrite(str(folder / "g.mtx"), scipy.sparse.coo_array(np.array([[0, 1.0], [0.5, 0]])))
    (folder / "e.csv.gz").write_bytes(gzip.compress(b"source,target\n0,1\n1,2\n"))
    (folder / "planetoid").mkdir()
    planetoid(folder / "planetoid")
    ogb_links(folder / "ogb", {"train": ends.T, "valid": ends.T[:1] + 3, "test": ends.T[:1] + 5}, "old arrays")
    return folder


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::UserWarning")  # NumPy's, of files without numbers
def test_a_damaged_file_is_read_or_refused_in_one_sentence(files: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(DAMAGED))
    original = (files / name).read_bytes()
    content = bytearray(original)
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (files / name).write_bytes(bytes(content))
    top = files / Path(name).parts[0]
    with contextlib.suppress(UserError):
        load(top, task="link")
    (files / name).write_bytes(original)


def test_an_array_larger_than_its_file_says_is_refused(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (35184372088832,), }"
    with zipfile.ZipFile(tmp_path / "g.npz", "w") as made:
        made.writestr("edge_index.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(UserError, match=r"cannot be read|does not fit into memory"):
        load(tmp_path / "g.npz")


def test_the_reader_of_edge_lists_is_called_by_itself(tmp_path: Path) -> None:
    written(tmp_path, EDGES, NODES)
    assert edge_lists.load(tmp_path / "edges.csv", undirected=False).edges == 4
