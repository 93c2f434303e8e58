"""The package graph: relations are edges, sections are labels, and a machine without apt is told so."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from espalier.graph.data import debian_packages
from espalier.recipe.errors import UserError

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


def test_relations_are_edges_and_sections_are_labels(monkeypatch):
    monkeypatch.setattr(debian_packages, "FEWEST", 2)
    found = debian_packages.read(TEXT)
    assert found["names"].tolist() == ["editor", "libc6", "tool", "viewer"]
    edges = set(zip(found["sources"].tolist(), found["targets"].tolist(), strict=True))
    assert edges == {(1, 2), (0, 2), (3, 2), (2, 0)}
    assert found["classes"].tolist() == ["utils"]
    assert found["labels"].tolist() == [0, -1, 0, -1]
    assert np.allclose(np.linalg.norm(found["features"], axis=1), 1)
    assert found["features"][0] @ found["features"][2] > 0.1  # both say "text"


def test_a_machine_without_apt_or_with_empty_lists_is_told_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="no apt-cache here"):
        debian_packages.load()
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, b"\n", b""))
    with pytest.raises(UserError, match="apt knows no packages"):
        debian_packages.load()


@pytest.mark.slow
def test_the_packages_of_this_machine_are_a_graph(tmp_path, monkeypatch):
    if shutil.which("apt-cache") is None:
        pytest.skip("no apt")
    names = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, check=True).stdout.split()
    if len(names) < 30_000:
        pytest.skip("apt's lists hold few packages: apt-get update")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph = debian_packages.load()
    assert graph.nodes > 10_000
    assert graph.edges > 4 * graph.nodes
    assert len(graph.classes) > 30
    assert np.array_equal(debian_packages.load().indices, graph.indices)  # from the cache
