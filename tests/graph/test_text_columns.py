"""Columns of words are hashed the same way in every process; ids are left out; a run knows its columns again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from espalier.graph.data.text_columns import hashed, tells_rows_apart, words_of
from espalier.recipe.errors import UserError
from table_graphs import accuracy, opened, reopened

CLASSES = ("plumber and pipes and taps", "violin or cello or bow", "wheat with barley with rye")
FILLERS = ["a", "the", "my", "new", "old", "small", "with", "some", "more", "less", "here", "there"]


def table(folder: Path, seed: int = 1, nodes: int = 240, ages: bool = True) -> Path:
    """People whose class shows in words of their biography alone: edges and ages are random."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 3, nodes)
    lines = ["id,label,key,bio" + ",age" * ages]
    for at, label in enumerate(labels.tolist()):
        words = [*random.choice(CLASSES[label].split(), 2), *random.choice(FILLERS, 4)]
        random.shuffle(words)
        lines.append(f"p{at},{'abc'[label]},k{seed}x{at},{' '.join(words)}" + f",{random.integers(18, 80)}" * ages)
    folder.mkdir(exist_ok=True)
    (folder / "nodes.csv").write_text("\n".join(lines) + "\n")
    ends = random.integers(0, nodes, (2 * nodes, 2)).tolist()
    (folder / "edges.csv").write_text("\n".join(["source,target", *(f"p{a},p{b}" for a, b in ends)]) + "\n")
    return folder / "edges.csv"


def test_words_are_without_case_and_marks_and_characters_are_words_where_nothing_parts_them() -> None:
    assert words_of("The CAFÉ, the cafe\u0301!") == ["the", "café", "the", "café"]
    assert words_of("東京都 Straße_3") == ["東", "京", "都", "strasse", "3"]
    assert words_of("NaN") == words_of("") == []


@pytest.mark.parametrize(("word", "at", "sign"), [("ulm", 100, 1), ("köln", 99, 1), ("東", 68, 1), ("mainz", 97, -1)])
def test_a_word_has_its_column_in_every_process(word: str, at: int, sign: int) -> None:
    row = hashed(np.array([word]), 128)[0]
    assert np.flatnonzero(row).tolist() == [at]
    assert row[at] == sign


def test_rows_have_length_one_and_no_order(tmp_path: Path) -> None:
    rows = hashed(np.array(["b a a", "a b A", "", None], object), 64)
    assert np.linalg.norm(rows, axis=1) == pytest.approx([1, 1, 0, 0])
    assert np.array_equal(rows[0], rows[1])


def test_columns_whose_words_tell_no_rows_apart_are_as_ids() -> None:
    for same in (["u1", "u2", "u3"], ["http://x/1a", "http://x/2b"], ["Ulm", "ulm"], ["", ""]):
        assert not tells_rows_apart(np.array(same))
    assert tells_rows_apart(np.array(["Ulm", "Ulm am Rhein", "Köln am Rhein"]))


def test_a_class_that_only_words_tell_is_learned_and_the_id_is_named(tmp_path: Path) -> None:
    path = table(tmp_path)
    model = {"kind": "sage"}
    workload = opened(path, model=model)
    assert accuracy(workload) > 0.9
    assert accuracy(opened(path, model=model, text=0)) < 0.6, "its age tells nothing"
    graph = workload.graph
    assert graph.columns[0] == "age"
    assert all(name.startswith("bio (words ") for name in graph.columns[1:])
    notes = workload.notes()
    assert "not used: column 'key' (words, none of them in several rows, as of an id)" in notes
    assert f"words of 'bio': {len(graph.columns) - 1} columns (graph.text)" in notes
    assert "not used: column 'bio' (words)" in opened(path, text=0).notes()


def test_words_weigh_by_how_few_rows_that_train_have_them(tmp_path: Path) -> None:
    graph = opened(table(tmp_path)).graph
    plain = opened(tmp_path / "edges.csv", standardise=False).graph
    assert np.array_equal(graph.features[:, 1:], plain.features[:, 1:])
    assert plain.features[:, 0].mean() > 18, "the age as it is"
    train = graph.parts.train
    weights = np.log((1 + len(train)) / (1 + (graph.features[train, 1:] != 0).sum(0))) + 1
    texts = [line.split(",")[3] for line in (tmp_path / "nodes.csv").read_text().splitlines()[1:]]
    rows = hashed(np.array(texts), 128)[:, [int(name.split()[2]) for name in graph.columns[1:]]]
    assert graph.features[:, 1:] == pytest.approx(rows * weights, abs=1e-6)


def test_words_alone_take_the_place_of_degrees(tmp_path: Path) -> None:
    workload = opened(table(tmp_path, ages=False))
    assert {name.partition(" ")[0] for name in workload.graph.columns} == {"bio"}
    assert not any("no column of nodes is a feature" in note for note in workload.notes())
    assert opened(tmp_path / "edges.csv", text=0).graph.columns == ("1", "log(1 + degree)")


def test_other_rows_have_the_columns_of_the_run(tmp_path: Path) -> None:
    path = table(tmp_path / "a")
    workload = opened(path)
    run = reopened(workload, tmp_path / "kept")
    assert np.array_equal(opened(path, run).graph.features, workload.graph.features)
    few = table(tmp_path / "b", seed=2, nodes=3)  # of which no word is repeated
    lines = (tmp_path / "b" / "nodes.csv").read_text().splitlines()
    texts = dict(zip("abc", ["plumber", "violin unheard", ""], strict=True))
    rows = [f"p{at},{'abc'[at]},k{at},{text},{30 + at}" for at, text in enumerate(texts.values())]
    (tmp_path / "b" / "nodes.csv").write_text("\n".join([lines[0], *rows]))
    again = opened(few, run).graph
    assert again.columns == workload.graph.columns
    ours = [opened(path).graph.columns.index(name) for name in again.columns]
    expected = hashed(np.array(["plumber"]), 128)[0]
    at = int(np.flatnonzero(expected)[0])
    column = again.columns.index(f"bio (words {at} of 128)")
    weight = 1 / workload.graph.column_scales[1, column]
    assert again.features[0, column] == pytest.approx(expected[at] * weight)
    assert ours == list(range(len(ours)))
    assert not again.features[2, 1:].any()

    before = replace(run, graph=replace(run.graph, columns=("age",), column_scales=run.graph.column_scales[:, :1]))
    old = opened(path, replace(before, widths=(1, 0)))  # of a run that left words out
    assert old.graph.columns == ("age",)
    assert "not used: column 'bio' (words)" in old.notes()


def test_lists_dates_and_words_of_edges_are_left_out(tmp_path: Path) -> None:
    path = table(tmp_path)
    lines = (tmp_path / "nodes.csv").read_text().splitlines()
    cells = [f"{line},2020-01-{at % 28 + 1:02},[{at % 3} 0.5]" for at, line in enumerate(lines[1:])]
    (tmp_path / "nodes.csv").write_text("\n".join([f"{lines[0]},born,place", *cells]))
    edges = path.read_text().splitlines()
    path.write_text("\n".join([f"{edges[0]},how", *(f"{line},by post" for line in edges[1:])]))
    workload = opened(path)
    notes = "\n".join(workload.notes())
    assert all(f"not used: column {name!r} (of " in notes for name in ("born", "place", "how"))
    assert {name.partition(" ")[0] for name in workload.graph.columns} == {"age", "bio"}


def test_words_among_numbers_are_refused(tmp_path: Path) -> None:
    path = table(tmp_path)
    lines = (tmp_path / "nodes.csv").read_text().splitlines()
    lines[3] = lines[3].rpartition(",")[0] + ",old"
    (tmp_path / "nodes.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match="'age' of nodes must be numbers, and one is 'old'"):
        opened(path)
