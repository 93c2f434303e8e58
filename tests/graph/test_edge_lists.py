"""Tables of nodes and edges: what their columns mean however they are stored, and what of them is refused."""

from __future__ import annotations

import numpy as np
import pytest
from tests.graph.conftest import load

from espalier.recipe.errors import UserError


def test_names_stand_for_nodes(tmp_path):
    (tmp_path / "net.csv").write_text("source,target\nann,bob\nbob,eve\n")
    (tmp_path / "net.nodes.csv").write_text("id,label,age\neve,x,1\nann,y,2\nbob,x,3\n")
    graph = load(tmp_path / "net.csv", undirected=False)
    assert graph.classes == ("x", "y")
    assert graph.labels.tolist() == [0, 1, 0]
    assert [graph.called(one) for one in graph.indices[graph.indptr[0] : graph.indptr[1]]] == ["bob"]
    (tmp_path / "net.csv").write_text("source,target\nann,zoe\n")
    with pytest.raises(UserError, match="zoe, which is no id"):
        load(tmp_path / "net.csv")


@pytest.mark.parametrize("form", ["csv", "csv with text", "text", "float"])
def test_whole_numbers_as_ids_are_named_alike_however_they_are_stored(tmp_path, form):
    ids, ends, part = [39, 3, 10], [(39, 3), (3, 10)], ["train", "validation", "test"]
    if form.startswith("csv"):
        text = form == "csv with text"
        lines = [f"{one},{at}" + (f",{part[at]}" if text else "") for at, one in enumerate(ids)]
        (tmp_path / "nodes.csv").write_text("\n".join(["id,label" + ",part" * text, *lines]) + "\n")
        (tmp_path / "edges.csv").write_text("source,target\n39,3\n3,10\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        kind = {"text": str, "float": float}[form]
        parquet.write_table(pyarrow.table({"id": [kind(one) for one in ids]}), tmp_path / "nodes.parquet")
        edges = {"source": [one for one, _ in ends], "target": [one for _, one in ends]}
        parquet.write_table(pyarrow.table(edges), tmp_path / "edges.parquet")
    graph = load(tmp_path, undirected=False)
    assert list(graph.names) == ["39", "3", "10"]
    assert (graph.find("39"), graph.find("3"), graph.find("10")) == (0, 1, 2)
    assert (graph.indices.tolist(), graph.targets().tolist()) == ([0, 1], [1, 2])
    with pytest.raises(UserError, match="no node '1'"):
        graph.find("1")


def test_two_nodes_of_one_id_are_refused(tmp_path):
    (tmp_path / "edges.csv").write_text("source,target\n7,8\n")
    (tmp_path / "nodes.csv").write_text("id,part\n7,train\n007,test\n8,test\n")
    with pytest.raises(UserError, match="two nodes have the id 7"):
        load(tmp_path)


def test_ids_too_large_for_a_float_are_told_apart(tmp_path):
    large = 2**53
    (tmp_path / "edges.csv").write_text(f"source,target\n{large},{large + 1}\n")
    with pytest.raises(UserError, match=f"edge at {large}"):
        load(tmp_path / "edges.csv")
    (tmp_path / "nodes.csv").write_text(f"id,age\n{large},1\n{large + 1},2\n")
    graph = load(tmp_path / "edges.csv", undirected=False)
    assert (graph.indices.tolist(), graph.targets().tolist()) == ([0], [1])
    assert graph.features[:, 0].tolist() == [1, 2]


def test_names_that_begin_further_down_are_names(tmp_path):
    (tmp_path / "edges.csv").write_text("source,target\n7,8\nann,8\n")
    (tmp_path / "nodes.csv").write_text("id,age\n7,1\n8,2\nann,3\n")
    graph = load(tmp_path / "edges.csv", undirected=False)
    assert sorted(zip(graph.indices.tolist(), graph.targets().tolist(), strict=True)) == [(0, 1), (2, 1)]


def test_words_among_the_numbers_of_a_feature_and_masks_of_other_length_are_refused(tmp_path):
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n")
    (tmp_path / "nodes.csv").write_text("age,height\n1,2\n2,tall\n")
    with pytest.raises(UserError, match="the feature 'height' of nodes must be numbers, and one is 'tall'"):
        load(tmp_path / "edges.csv")
    ends = np.array([[0, 1], [1, 2]])
    np.savez(tmp_path / "g.npz", edge_index=ends, x=np.ones((3, 2)), train_mask=np.ones(2, bool))
    with pytest.raises(UserError, match=r"mask of the training part has the shape \[2\], and there are 3 nodes"):
        load(tmp_path / "g.npz")


def test_labels_and_parts_that_are_missing_are_none(tmp_path):
    labels = ["b", "-1", "", "nan", "None", "a"]
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n")
    (tmp_path / "nodes.csv").write_text("label,part\n" + "".join(f"{one},train\n" for one in labels))
    graph = load(tmp_path)
    assert (graph.labels.tolist(), graph.classes) == ([1, -1, -1, -1, -1, 0], ("a", "b"))
    numbers = "".join(f"{one},train\n" for one in (*range(12), -1, ""))
    (tmp_path / "nodes.csv").write_text("label,part\n" + numbers)
    assert load(tmp_path).labels.tolist() == [*range(12), -1, -1]
    (tmp_path / "nodes.csv").write_text("label\n0.5\n1\n")
    assert load(tmp_path).labels.tolist() == [[0.5], [1.0]]


def test_nulls_of_parquet_are_no_label_and_no_part(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"source": [0], "target": [1]}), tmp_path / "edges.parquet")
    nodes = {"label": ["x", None, "y", None], "part": ["train", None, "test", "validation"]}
    parquet.write_table(pyarrow.table(nodes), tmp_path / "nodes.parquet")
    graph = load(tmp_path)
    assert (graph.labels.tolist(), graph.classes) == ([0, -1, 1, -1], ("x", "y"))
    assert [ids.tolist() for _, ids in graph.parts.named()] == [[0], [3], [2]]


def test_names_without_a_table_of_nodes_are_refused_by_the_first(tmp_path):
    (tmp_path / "edges.csv").write_text("source,target\nann,bob\nbob,1\n")
    with pytest.raises(UserError, match="ends of edges must be numbers") as error:
        load(tmp_path / "edges.csv")
    assert "one is 'ann'" in str(error.value)
    assert "nodes.csv" in str(error.value)
