"""Graphs of packages and of WordNet: relations are edges, sections and lexicographers' files are labels, names stay."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from espalier.graph.data import array_file

FILE = Path(__file__).parents[2] / "examples" / "text_graphs.py"
SPEC = importlib.util.spec_from_file_location("text_graphs", FILE)
text_graphs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(text_graphs)

TEXT = """Package: tool
Depends: libc6 (>= 2.34), editor | viewer:any (<< 2), gone
Pre-Depends: libc6
Suggests: tool
Section: non-free/utils
Description: A tool for text

Package: libc6
Section: libs
Description: C library

Package: editor
Recommends: tool
Description: Edits text
 and more
Section: utils

Package: viewer
Section: games

Package: tool
Section: games
"""
LICENCE = "  1 This software and database is being provided to you\n"
FILES = {
    "noun": "00000010 05 n 02 dog 0 domestic_dog 1 002 @ 00000020 n 0000 + 00000010 v 0101 | a tame animal  \n"
    "00000020 05 n 01 animal 0 002 ~ 00000010 n 0000 = 00000020 n 0000 | a living being that moves  \n",
    "verb": "00000010 38 v 01 dog 0 001 + 00000010 n 0101 01 + 08 00 | go after  \n",
    "adj": "00000010 00 s 01 tame 0 000 | not wild  \n00000020 44 a 01 tamed 0 001 & 00000010 s 0000 | made tame  \n",
    "adv": "00000010 02 r 0a a 0 b 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 j 0 000 | ten words, their number in hexadecimal  \n",
}


def graph_of(arrays, folder, **options):
    np.savez(folder / "graph.npz", **arrays)
    return array_file.load(folder / "graph.npz", undirected=False, **options)


def edges(graph):
    targets = np.repeat(np.arange(graph.nodes), np.diff(graph.indptr))
    return set(zip(graph.indices.tolist(), targets.tolist(), strict=True))


def test_dependencies_are_edges_and_sections_are_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(text_graphs, "FEWEST", 2)
    graph = graph_of(text_graphs.packages(TEXT), tmp_path)
    assert list(graph.names) == ["editor", "libc6", "tool", "viewer"]
    assert edges(graph) == {(1, 2), (0, 2), (3, 2), (2, 0)}
    assert graph.classes == ("utils",)
    assert graph.labels.tolist() == [0, -1, 0, -1]
    assert np.allclose(np.linalg.norm(graph.features, axis=1), 1)
    assert graph.features[0] @ graph.features[2] > 0.1  # both say "text"


def test_relations_of_words_are_edges_and_files_are_labels(tmp_path):
    for name, text in FILES.items():
        (tmp_path / f"data.{name}").write_text(LICENCE + text)
    graph = graph_of(text_graphs.wordnet(tmp_path), tmp_path)
    nouns = ["dog.n.00000010", "animal.n.00000020", "dog.v.00000010"]
    assert list(graph.names) == [*nouns, "tame.a.00000010", "tamed.a.00000020", "a.r.00000010"]
    assert edges(graph) == {(0, 1), (0, 2), (1, 0), (2, 0), (4, 3)}  # none to itself
    labels = [graph.classes[label] for label in graph.labels]
    assert labels == ["noun.animal", "noun.animal", "verb.motion", "adj.all", "adj.ppl", "adv.all"]
    assert graph.features[0] @ graph.features[4] > 0.1  # both say "tame"


def test_names_of_another_number_than_nodes_are_refused(tmp_path):
    with pytest.raises(Exception, match="names"):
        graph_of(text_graphs.packages(TEXT) | {"node_names": np.array(["only"])}, tmp_path)


@pytest.mark.parametrize("noun", ["00000010 05 n 01 dog 0 001 @ 00000099 n 0000 | \n", "no database\n"])
def test_what_is_no_database_is_named(tmp_path, noun):
    for part, text in (FILES | {"noun": noun}).items():
        (tmp_path / f"data.{part}").write_text(LICENCE + text)
    with pytest.raises(SystemExit, match="cannot be read"):
        text_graphs.read(tmp_path)


def test_a_machine_without_apt_or_with_empty_lists_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(text_graphs, "INSTALLED", tmp_path / "nowhere")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="no apt-cache here"):
        text_graphs.written("packages", tmp_path / "x.npz")
    with pytest.raises(SystemExit, match="there is no apt-get here"):
        text_graphs.written("wordnet", tmp_path / "x.npz")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    answers = iter([(0, b"\n", b""), (100, b"", b"E: Unable to locate package wordnet-base")])
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, *next(answers)))
    with pytest.raises(SystemExit, match="apt knows no packages"):
        text_graphs.written("packages", tmp_path / "x.npz")
    with pytest.raises(SystemExit, match="Unable to locate package"):
        text_graphs.written("wordnet", tmp_path / "x.npz")


def of_this_machine(name, folder, absent):
    """The graph that the program writes; skipped only where it says `absent`: another failure is one."""
    file = folder / f"{name}.npz"
    command = [sys.executable, str(FILE), name, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode and absent in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return array_file.load(file, undirected=True)


@pytest.mark.slow
def test_the_packages_of_this_machine_are_a_graph(tmp_path):
    if shutil.which("apt-cache") is None:
        pytest.skip("no apt")
    names = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, check=True).stdout.split()
    if len(names) < 30_000:
        pytest.skip("apt's lists hold few packages: apt-get update")
    graph = of_this_machine("packages", tmp_path, "apt knows no packages")
    assert graph.nodes > 10_000
    assert graph.edges > 4 * graph.nodes
    assert len(graph.classes) > 30


@pytest.mark.slow
def test_wordnet_has_its_117659_synsets(tmp_path):
    graph = of_this_machine("wordnet", tmp_path, text_graphs.ABSENT)
    assert (graph.nodes, graph.edges) == (117_659, 2 * 183_789)
    assert int((graph.degrees() == 0).sum()) == 1_009
    assert np.array_equal(np.unique(graph.labels), np.arange(45))
