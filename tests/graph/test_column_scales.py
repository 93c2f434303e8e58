"""Columns of tables are standardised by the rows that train; runs, predictions and other data use the same scales."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.graph.data import kept_graph
from espalier.graph.data.column_scales import scales_of, standardised
from espalier.graph.parts import partition_folder
from espalier.graph.parts.halo import boundary
from espalier.graph.sampling.neighbor_sampler import Style
from espalier.recipe.errors import UserError
from table_graphs import accuracy, opened, reopened

NODES = 240
COLUMNS = ("age", "income", "followers", "smoker", "same")


def table(folder: Path, seed: int = 1, nodes: int = NODES) -> Path:
    """People of three classes: the age tells the class, the income, in hundreds of thousands, tells nothing."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, nodes)
    rows = np.stack(
        [
            25 + 12 * labels + random.normal(0, 4, nodes),
            random.lognormal(12, 0.6, nodes),
            np.floor(random.pareto(1.0, nodes) * 20),
            random.random(nodes) < (0.1 + 0.4 * labels),
            np.full(nodes, 7),
        ],
        1,
    )
    lines = [",".join(("id", "label", *COLUMNS))]
    lines += [f"p{at},{'abc'[labels[at]]},{','.join(map(str, row))}" for at, row in enumerate(rows.tolist())]
    folder.mkdir(exist_ok=True)
    (folder / "nodes.csv").write_text("\n".join(lines) + "\n")
    ends = [(at, random.choice(np.flatnonzero(labels == labels[at]))) for at in range(nodes) for _ in range(2)]
    ends += random.integers(0, nodes, (nodes, 2)).tolist()
    (folder / "edges.csv").write_text("\n".join(["source,target", *(f"p{a},p{b}" for a, b in ends)]) + "\n")
    return folder / "edges.csv"


def raw(path: Path) -> np.ndarray:
    return opened(path, standardise=False).graph.features.astype(np.float64)


def test_rows_that_train_have_mean_0_and_deviation_1_and_others_do_not_count(tmp_path: Path) -> None:
    path = table(tmp_path)
    workload = opened(path)
    graph = workload.graph
    train = graph.parts.train
    assert len(train) == 144
    for at in (0, 1, 2):
        column = graph.features[train, at].astype(np.float64)
        assert abs(column.mean()) < 1e-6
        assert column.std() == pytest.approx(1, abs=1e-6)
    given_rows = raw(path)
    age = given_rows[train, 0]
    assert graph.features[:, 0] == pytest.approx((given_rows[:, 0] - age.mean()) / age.std(), abs=1e-5)
    damped = np.log1p(given_rows[:, 2])
    assert graph.features[:, 2] == pytest.approx((damped - damped[train].mean()) / damped[train].std(), abs=1e-5)
    assert np.array_equal(graph.features[:, 3], given_rows[:, 3])
    assert not graph.features[:, 4].any()
    (note,) = (note for note in workload.notes() if "standardised" in note)
    assert note == (
        "columns by 144 nodes that train: standardised: age, income; 0 or 1, as they are: smoker; constant, now 0: "
        "same; counts, log(1 + x) standardised: followers (graph.standardise)"
    )


@given(st.data())
def test_scales_depend_on_no_order_and_every_value_is_finite(data: Any) -> None:
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 3)))
    cells = st.floats(-(2.0**60), 2.0**60, width=32) | st.sampled_from([0.0, 1.0, 7.0, 1e6])
    rows = np.array(data.draw(st.lists(st.lists(cells, min_size=shape[1], max_size=shape[1]), min_size=shape[0])))
    scales = scales_of(rows)
    order = data.draw(st.permutations(range(len(rows))))
    assert np.array_equal(scales_of(rows[order]), scales)
    assert np.isfinite(standardised(rows, scales)).all()


def test_a_column_that_is_constant_where_it_trains_is_0_in_other_rows(tmp_path: Path) -> None:
    scales = scales_of(np.array([[7.0, 1.0], [7.0, 1.0]]))
    assert standardised(np.array([[9.0, 0.0], [7.0, 1.0]]), scales).tolist() == [[0, 0], [0, 1]]


def test_a_run_taken_up_again_and_other_rows_have_the_scales_of_the_run(tmp_path: Path) -> None:
    path = table(tmp_path / "a")
    workload = opened(path)
    run = reopened(workload, tmp_path / "kept")
    assert np.array_equal(run.graph.features, workload.graph.features)
    resumed = opened(path, run)
    assert np.array_equal(resumed.graph.features, workload.graph.features)
    assert resumed.notes() == workload.notes()
    other = table(tmp_path / "b", seed=2, nodes=90)
    given_rows = raw(other)
    assert np.array_equal(opened(other, run).graph.features, standardised(given_rows, workload.graph.column_scales))
    again = opened(other, run)
    (tmp_path / "again").mkdir()
    again.freeze(tmp_path / "again", again.graph)
    assert np.array_equal(kept_graph.read(tmp_path / "again").graph.column_scales, workload.graph.column_scales)
    before = replace(run, graph=replace(run.graph, column_scales=None))  # of a run that standardised nothing
    assert np.array_equal(opened(path, before).graph.features, raw(path).astype(np.float32))


def test_links_are_learned_from_all_nodes_and_so_are_scales(tmp_path: Path) -> None:
    graph = opened(table(tmp_path), task="link").graph
    assert graph.features[:, 0].astype(np.float64).std() == pytest.approx(1, abs=1e-6)


def test_arrays_and_degrees_stay_as_they_are(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(50, 9, (20, 3)).astype(np.float32)
    np.savez(tmp_path / "x.npz", edge_index=np.array([[0, 1], [1, 2]]), x=rows, y=np.arange(20) % 2)
    assert np.array_equal(opened(tmp_path / "x.npz").graph.features, rows)
    (tmp_path / "nodes.csv").write_text("id,label\n" + "".join(f"p{at},{'ab'[at % 2]}\n" for at in range(9)))
    (tmp_path / "edges.csv").write_text("source,target\np0,p1\np1,p2\n")
    graph = opened(tmp_path / "edges.csv").graph
    assert graph.features[1].tolist() == pytest.approx([1, np.log(3)])
    assert not [note for note in graph.notes if "nodes that train" in note]


def test_a_missing_value_is_refused_with_its_column(tmp_path: Path) -> None:
    path = table(tmp_path)
    lines = (tmp_path / "nodes.csv").read_text().splitlines()
    cells = lines[5].split(",")
    cells[3] = ""
    lines[5] = ",".join(cells)
    (tmp_path / "nodes.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match="row 4, column 'income'"):
        opened(path)


def test_columns_of_very_different_scale_are_learned_from_where_they_are_standardised(tmp_path: Path) -> None:
    path = table(tmp_path)
    plain, scaled = (accuracy(opened(path, standardise=standardise)) for standardise in (False, True))
    assert scaled > 0.7
    assert scaled > plain + 0.2


def test_a_folder_of_parts_keeps_the_scales(tmp_path: Path) -> None:
    graph = opened(table(tmp_path)).graph
    assert graph.column_scales is not None
    cut = boundary(graph.indptr, graph.indices, np.arange(graph.nodes) % 2, 2)
    partition_folder.write(tmp_path / "parts", graph, Style(loops=True, scale="symmetric"), cut)
    outline, _ = partition_folder.outlined(tmp_path / "parts")
    assert np.array_equal(outline.column_scales, graph.column_scales)
