"""Tables and matrices as R, Excel, Neo4j and SciPy write them: values that are missing, ids with leading zeros, masks
by other names, and numbers in words are taken for nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from espalier import recipe as config
from espalier.graph.data import edge_lists, sources
from espalier.graph.data.graph import Graph
from espalier.recipe import Data
from espalier.recipe.errors import UserError

EDGES = "source,target\na,b\nb,c\n"


def load(place: Path, **options: Any) -> Graph:
    return sources.load(Data(path=str(place)), config.GraphOptions(undirected=False, **options))


def written(folder: Path, nodes: str, edges: str = EDGES, ending: str = "csv") -> Path:
    (folder / f"edges.{ending}").write_text(edges)
    (folder / f"nodes.{ending}").write_text(nodes)
    return folder


def ends(graph: Graph) -> list[tuple[int, int]]:
    return list(zip(graph.indices.tolist(), graph.targets().tolist(), strict=True))


# --- missing values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["NA", "N/A", "#N/A", "<NA>", "NULL", "nan", ""])
def test_words_for_a_missing_value_are_no_class_and_no_reason_to_take_values_for_classes(
    tmp_path: Path, word: str
) -> None:
    graph = load(written(tmp_path, f"id,label,f\na,red,1\nb,{word},2\nc,blue,3\n"))
    assert graph.classes == ("blue", "red")
    assert "1 of 3 nodes have no label" in graph.notes
    graph = load(written(tmp_path, f"id,y,f\na,1.5,1\nb,{word},2\nc,2.5,3\n"))
    np.testing.assert_array_equal(graph.labels, [[1.5], [np.nan], [2.5]])
    with pytest.raises(UserError, match="hold NaN or infinity, first in row 1, column 'f'"):
        load(written(tmp_path, f"id,f\na,1\nb,{word},\nc,3\n".replace(",\nc", "\nc")))


def test_an_edge_without_an_end_leads_nowhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="edge at an empty cell"):
        load(written(tmp_path, "id,f\n1,1\n2,2\n", "source,target\n1,2\n2,\n"))
    for ids in ("1 2 ", "a b "):
        rows = "".join(f"{name},1\n" for name in ids.split(" "))
        with pytest.raises(UserError, match=r"a node has no id \(row 2"):
            load(written(tmp_path, f"id,f\n{rows}", f"source,target\n{ids[0]},{ids[2]}\n{ids[2]},\n"))


# --- ids -------------------------------------------------------------------------------------------------------------


def test_leading_zeros_are_part_of_a_name(tmp_path: Path) -> None:
    nodes = "id,label,f\n007,01234,1\n010,1234,2\n008,01234,9\n"
    graph = load(written(tmp_path, nodes, "source,target\n007,010\n010,008\n"))
    assert list(graph.names) == ["007", "010", "008"]
    assert ends(graph) == [(0, 1), (1, 2)]
    assert graph.classes == ("01234", "1234")
    assert ends(load(written(tmp_path, nodes, "source,target\n7,10\n10,8\n"))) == [(0, 1), (1, 2)]


def test_numbers_with_leading_zeros_are_features(tmp_path: Path) -> None:
    graph = load(written(tmp_path, "id,month\na,01\nb,02\nc,11\n"))
    assert graph.features[:, 0].tolist() == [1, 2, 11]


def test_a_graph_counted_from_one_is_said_to_have_a_node_0(tmp_path: Path) -> None:
    (tmp_path / "g.txt").write_text("1 2\n2 3\n")
    assert any("names node 0" in note for note in load(tmp_path / "g.txt").notes)
    (tmp_path / "g.txt").write_text("0 2\n2 3\n")
    assert not any("names node 0" in note for note in load(tmp_path / "g.txt").notes)


def test_white_space_separates_quoted_cells(tmp_path: Path) -> None:
    nodes = '"id" "label" "f"\n"a" "dark red" 1\n"b" "blue" 2\n"c" "" 3\n'
    graph = load(written(tmp_path, nodes, '"from" "to" "weight"\n"a" "b" 2\n"b" "c" 1\n', "txt"))
    assert (list(graph.names), graph.columns, graph.classes) == (["a", "b", "c"], ("f",), ("blue", "dark red"))
    assert graph.weights is not None
    assert graph.weights.tolist() == [2, 1]


# --- columns ---------------------------------------------------------------------------------------------------------


def test_masks_by_the_names_of_parts_are_no_features(tmp_path: Path) -> None:
    graph = load(written(tmp_path, "id,train,is_val,test,f\na,1,0,0,1\nb,0,1,0,2\nc,0,0,1,3\n"))
    assert graph.parts is not None
    assert [ids.tolist() for _, ids in graph.parts.named()] == [[0], [1], [2]]
    assert graph.columns == ("f",)
    assert "column 'is_val' of nodes.csv is the mask of a part" in graph.notes
    scores = load(written(tmp_path, "id,train,test,f\na,0.5,1,1\nb,0.25,0,2\nc,1,1,3\n"))
    assert (scores.parts, scores.columns) == (None, ("train", "test", "f"))


def test_tables_of_neo4j(tmp_path: Path) -> None:
    nodes = "personId:ID(Person),name,age:int,:LABEL\n16,Ann,3,Person\n27,Bob,4,Person\n20,Cy,5,Person\n"
    edges = ":START_ID(Person),:END_ID(Person),:TYPE,weight:float\n16,27,KNOWS,2\n27,20,KNOWS,0.5\n"
    graph = load(written(tmp_path, nodes, edges))
    assert (list(graph.names), ends(graph), graph.labels) == (["16", "27", "20"], [(0, 1), (1, 2)], None)
    assert graph.weights is not None
    assert graph.weights.tolist() == [2, 0.5]
    assert "not used: column ':TYPE' (of edges.csv, always 'KNOWS')" in graph.notes
    with pytest.raises(UserError, match="the column ':TYPE'"):
        load(written(tmp_path, nodes, edges.replace("27,20,KNOWS", "27,20,LIKES")))
    with pytest.raises(UserError, match="the column ':LABEL'"):
        load(written(tmp_path, nodes.replace("4,Person", "4,Company"), edges))


def test_values_written_as_words_are_not_silently_classes(tmp_path: Path) -> None:
    edges = EDGES.replace(",", ";")
    graph = load(written(tmp_path, "id;label;f\na;1,25;1\nb;;2\nc;2,5;3\n", edges))
    np.testing.assert_array_equal(graph.labels, [[1.25], [np.nan], [2.5]])
    assert "the labels of nodes.csv have decimal commas" in graph.notes
    with pytest.raises(UserError, match="decimals or thousands"):
        load(written(tmp_path, "id;label;f\na;1,250;1\nb;2,500;2\nc;3,100;3\n", edges))


# --- matrices --------------------------------------------------------------------------------------------------------


def test_rows_of_a_matrix_are_rows_of_its_table_of_nodes(tmp_path: Path) -> None:
    matrix = "%%MatrixMarket matrix coordinate pattern general\n4 4 2\n2 3\n3 4\n"
    (tmp_path / "edges.mtx").write_text(matrix)
    for ids in ("1234", "wxyz"):
        (tmp_path / "nodes.csv").write_text("id,f\n" + "".join(f"{name},1\n" for name in ids))
        graph = load(tmp_path)
        assert (list(graph.names), ends(graph)) == (list(ids), [(1, 2), (2, 3)])
    for ids in ("3214", "123"):
        (tmp_path / "nodes.csv").write_text("id,f\n" + "".join(f"{name},1\n" for name in ids))
        with pytest.raises(UserError, match="the rows of a matrix are those of its table"):
            load(tmp_path)


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_a_matrix_of_scipy_is_a_graph(tmp_path: Path, form: str) -> None:
    matrix = scipy.sparse.coo_matrix(([2.0, 3, 4], ([0, 1, 2], [1, 3, 0])), (5, 5)).asformat(form)
    scipy.sparse.save_npz(tmp_path / "g.npz", matrix)
    graph = load(tmp_path / "g.npz")
    assert (graph.nodes, ends(graph)) == (5, [(2, 0), (0, 1), (1, 3)])
    assert graph.weights is not None
    assert graph.weights.tolist() == [4, 2, 3]


def test_matrices_of_scipy_that_are_no_graph_are_refused(tmp_path: Path) -> None:
    for matrix, reason in (
        (scipy.sparse.csr_matrix(np.eye(3)[:2]), "2 rows and 3 columns"),
        (scipy.sparse.bsr_matrix(np.eye(4)), "in the format bsr"),
    ):
        scipy.sparse.save_npz(tmp_path / "g.npz", matrix)
        with pytest.raises(UserError, match=reason):
            load(tmp_path / "g.npz")
    np.savez(tmp_path / "g.npz", format=b"csr", data=np.ones(2), indices=[0, 7], indptr=[0, 1, 2, 2], shape=[3, 3])
    with pytest.raises(UserError, match="has the id 7, outside the graph"):
        load(tmp_path / "g.npz")
    sizes = {"indptr": [0, 2, 1, 3], "indices": [0, 1, 2], "data": [1.0, 1, 1], "shape": [3, 3]}
    np.savez(tmp_path / "g.npz", format=b"csr", **sizes)
    with pytest.raises(UserError, match=r"g\.npz cannot be read"):
        load(tmp_path / "g.npz")


def test_a_mask_of_numbers_of_nodes_is_refused(tmp_path: Path) -> None:
    edges = np.array([[0, 1], [1, 2]])
    np.savez(tmp_path / "g.npz", edge_index=edges, x=np.eye(3), y=[0, 1, 0], train_mask=[0, 2, 1])
    with pytest.raises(UserError, match="mask of the training part holds 2"):
        load(tmp_path / "g.npz")


def test_a_table_of_nodes_beside_arrays_is_named_and_so_are_all_keys_of_a_file_without_edges(tmp_path: Path) -> None:
    np.savez(tmp_path / "edges.npz", edge_index=np.array([[0, 1], [1, 2]]))
    (tmp_path / "nodes.csv").write_text("id,label\n0,a\n1,b\n2,c\n")
    assert "not used: file 'nodes.csv'" in load(tmp_path).notes
    np.savez(tmp_path / "edges.npz", adj=np.eye(3), y=[0, 1, 0])
    with pytest.raises(UserError, match="it has adj, y"):
        load(tmp_path)


# --- labels in several columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["label_0,label_1", "y1,y2", "target.1,target.2"])
def test_labels_in_several_columns_are_no_features(tmp_path: Path, names: str) -> None:
    graph = load(written(tmp_path, f"id,{names},f\na,1.5,-2,1\nb,,3,2\nc,2.5,4,3\n"))
    assert (graph.kind, graph.columns) == ("values", ("f",))
    np.testing.assert_array_equal(graph.labels, [[1.5, -2], [np.nan, 3], [2.5, 4]])
    assert f"columns of nodes.csv: {names.replace(',', ', ')} are the labels" in graph.notes
    words = load(written(tmp_path, f"id,{names},f\na,p,q,1\nb,p,r,2\nc,q,r,3\n"))
    assert (words.labels, words.columns, len(words.notes)) == (None, ("f",), 2)
    tasks = load(written(tmp_path, f"id,{names},f\na,1,0,1\nb,0,1,2\nc,1,1,3\n"))
    assert (tasks.kind, tasks.outputs) == ("tasks", 2)


def test_coordinates_are_features(tmp_path: Path) -> None:
    graph = load(written(tmp_path, "id,x1,y1,x2,y2\na,1,0,1,5\nb,0,1,2,5\nc,1,1,3,5\n"))
    assert (graph.labels, graph.columns) == (None, ("x1", "y1", "x2", "y2"))


def test_lists_in_a_column_of_labels_are_rows_of_answers(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    parquet.write_table(table({"source": ["a", "b"], "target": ["b", "c"]}), tmp_path / "edges.parquet")
    rows = {"id": ["a", "b", "c"], "label": [[1, 0], [0, 1], [1, 1]], "f": [1, 2, 3]}
    parquet.write_table(table(rows), tmp_path / "nodes.parquet")
    assert load(tmp_path).kind == "tasks"


def test_a_second_column_of_labels_is_no_feature(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("source,target\n0,1\n1,2\n")
    (tmp_path / "nodes.csv").write_text("id,label,label_id,size\n0,a,0,1.5\n1,b,1,2.5\n2,a,0,0.5\n")
    with pytest.raises(UserError, match=r"'label' and 'label_id'"):
        edge_lists.load(tmp_path / "edges.csv", undirected=True)
