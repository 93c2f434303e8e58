"""WordNet: relations are edges, lexicographers' files are labels, and a machine that cannot have it is told so."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from espalier.graph.data import sources, wordnet
from espalier.recipe.errors import UserError

LICENCE = "  1 This software and database is being provided to you\n"
FILES = {
    "noun": "00000010 05 n 02 dog 0 domestic_dog 1 002 @ 00000020 n 0000 + 00000010 v 0101 | a tame animal  \n"
    "00000020 05 n 01 animal 0 002 ~ 00000010 n 0000 = 00000020 n 0000 | a living being that moves  \n",
    "verb": "00000010 38 v 01 dog 0 001 + 00000010 n 0101 01 + 08 00 | go after  \n",
    "adj": "00000010 00 s 01 tame 0 000 | not wild  \n00000020 44 a 01 tamed 0 001 & 00000010 s 0000 | made tame  \n",
    "adv": "00000010 02 r 0a a 0 b 0 c 0 d 0 e 0 f 0 g 0 h 0 i 0 j 0 000 | ten words, their number in hexadecimal  \n",
}


def written(folder, **changes):
    for name, text in (FILES | changes).items():
        (folder / f"data.{name}").write_text(LICENCE + text)
    return folder


def test_relations_are_edges_and_files_are_labels(tmp_path):
    found = wordnet.read(written(tmp_path))
    nouns = ["dog.n.00000010", "animal.n.00000020", "dog.v.00000010"]
    assert found["names"].tolist() == [*nouns, "tame.a.00000010", "tamed.a.00000020", "a.r.00000010"]
    edges = set(zip(found["sources"].tolist(), found["targets"].tolist(), strict=True))
    assert edges == {(0, 1), (0, 2), (1, 0), (2, 0), (4, 3)}  # none to itself
    labels = [wordnet.CLASSES[one] for one in found["labels"]]
    assert labels == ["noun.animal", "noun.animal", "verb.motion", "adj.all", "adj.ppl", "adv.all"]
    assert found["features"][0] @ found["features"][4] > 0.1  # both say "tame"


@pytest.mark.parametrize("noun", ["00000010 05 n 01 dog 0 001 @ 00000099 n 0000 | \n", "no database\n"])
def test_what_is_no_database_is_named(tmp_path, noun):
    with pytest.raises(UserError, match="cannot be read"):
        wordnet.read(written(tmp_path, noun=noun))


def test_a_machine_that_cannot_have_it_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(wordnet, "INSTALLED", tmp_path / "nowhere")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="there is no apt-get here"):
        wordnet.load()
    monkeypatch.setattr(shutil, "which", lambda name: name)
    failed = subprocess.CompletedProcess([], 100, b"", b"E: Unable to locate package wordnet-base")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(UserError, match="Unable to locate package"):
        sources.MACHINE["debian:wordnet"](None)


@pytest.mark.slow
def test_wordnet_has_its_117659_synsets(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        graph = wordnet.load()
    except UserError as error:
        if "neither installed nor to be had" not in str(error):
            raise  # the database is there and was not read
        pytest.skip(str(error))
    assert (graph.nodes, graph.edges) == (117_659, 2 * 183_789)
    assert int((graph.degrees() == 0).sum()) == 1_009
    assert np.array_equal(np.unique(graph.labels), np.arange(45))
    assert np.array_equal(wordnet.load().indices, graph.indices)  # from the cache
