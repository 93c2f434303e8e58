"""WordNet (`debian:wordnet`): words and what they mean, from the Debian package wordnet-base (Fellbaum, 1998).

A node is a synset (words that mean the same), an edge any relation of the database (is a kind of, is part of, derives
from, ...). Features count the words of the synset and of its definition (hashed into 512 columns, TF-IDF, rows of
length one), the label is the lexicographer's file (`noun.animal`, `verb.motion`, ...).
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from espalier.graph.data.graph import Array, Graph, Progress
from espalier.graph.data.import_graph import count_words, kept_arrays, weighted
from espalier.recipe.cache_dir import cache_folder
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing

COLUMNS = 512
INSTALLED = Path("/usr/share/wordnet")
PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
"""Files of the database, and how relations name them (`s`, satellite adjectives, are in `adj` too)."""
FORMAT = 1

_NOUNS = (
    "Tops act animal artifact attribute body cognition communication event feeling food group location motive object "
    "person phenomenon plant possession process quantity relation shape state substance time"
)
_VERBS = (
    "body change cognition communication competition consumption contact creation emotion motion perception possession "
    "social stative weather"
)
CLASSES = (
    *("adj.all", "adj.pert", "adv.all"),
    *(f"noun.{topic}" for topic in _NOUNS.split()),
    *(f"verb.{topic}" for topic in _VERBS.split()),
    "adj.ppl",
)
"""Lexicographers' files by number (lexnames, section 5 of WordNet's manual)."""


class Synset(NamedTuple):
    """One line of a data file. `key`: the file's letter and the offset in it; `relations`: to which keys."""

    key: str
    words: list[str]
    label: int
    relations: list[str]
    definition: str


def load(progress: Progress | None = None) -> Graph:
    """WordNet as a graph, kept in the cache folder. Relations are edges both ways.

    Raises UserError where the package is neither installed nor to be had.
    """
    arrays = kept_arrays(f"wordnet-{FORMAT}", lambda: _read(progress))
    return Graph.from_edges(
        **{**arrays, "names": arrays["names"].tolist()},
        undirected=True,
        classes=CLASSES,
        origin="debian:wordnet",
    )


def _read(progress: Progress | None) -> dict[str, Array]:
    if (INSTALLED / "data.noun").exists():
        return read(INSTALLED, progress)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        return read(_unpacked(Path(folder)), progress)


def _unpacked(folder: Path) -> Path:
    """Fetches the package and unpacks it in `folder`; nothing is installed. Raises UserError."""
    why = "there is no apt-get here"
    if shutil.which("apt-get") is not None and shutil.which("dpkg-deb") is not None:
        why = _ran(["apt-get", "download", "wordnet-base"], folder)
        why = why or _ran(["dpkg-deb", "-x", *map(str, folder.glob("*.deb")), "."], folder)
    if not why:
        return folder / INSTALLED.relative_to("/")
    raise UserError(
        "data.path = 'debian:wordnet': the package wordnet-base is neither installed nor to be had.",
        why=why,
        do="apt-get update; apt-get install wordnet-base",
    )


def _ran(command: list[str], folder: Path) -> str:
    """Why it failed; empty where it did not."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=300)
    except subprocess.TimeoutExpired:
        return f"{command[0]} took longer than 300 s"
    if not done.returncode:
        return ""
    return done.stderr.decode(errors="replace").strip() or f"{command[0]} failed"


def synsets(lines: Iterator[str], letter: str) -> Iterator[Synset]:
    """Of a data file; `letter` of `PARTS`. Lines of its licence begin with a space."""
    for line in lines:
        if line.startswith(" "):
            continue
        entry, _, definition = line.partition("|")
        fields = entry.split()
        words = int(fields[3], 16)
        relations = fields[5 + 2 * words :][: 4 * int(fields[4 + 2 * words])]
        ends = [
            f"{'a' if part == 's' else part}{at}" for at, part in zip(relations[1::4], relations[2::4], strict=True)
        ]
        yield Synset(letter + fields[0], fields[4 : 4 + 2 * words : 2], int(fields[1]), ends, definition.strip())


def read(folder: Path, progress: Progress | None = None) -> dict[str, Array]:
    """Arrays `sources`, `targets`, `features`, `labels` and `names` of the database in `folder`.

    Names are `word.part of speech.offset`. Raises UserError for files that are no database.
    """
    with parsing(folder, "apt-get install --reinstall wordnet-base"):
        every = [
            synset for name, letter in PARTS.items() for synset in synsets(_lines(folder / f"data.{name}"), letter)
        ]
        place = {synset.key: at for at, synset in enumerate(every)}
        ends = {
            (at, place[other]) for at, synset in enumerate(every) for other in synset.relations if place[other] != at
        }
        counted = np.zeros((len(every), COLUMNS), np.float32)
        column = dict[bytes, int]()
        for at, synset in enumerate(every):
            words = " ".join(synset.words).replace("_", " ").replace("-", " ")
            count_words(f"{words} {synset.definition}".lower().encode(), counted[at], column)
            if progress is not None and at % 4096 == 0:
                progress(at, len(every))
        sources, targets = np.array(sorted(ends), np.int64).reshape(-1, 2).T
        return {
            **{"sources": sources, "targets": targets, "features": weighted(counted)},
            "labels": np.array([synset.label for synset in every], np.int64),
            "names": np.array([f"{synset.words[0]}.{synset.key[0]}.{synset.key[1:]}" for synset in every]),
        }


def _lines(file: Path) -> Iterator[str]:
    with file.open(encoding="latin-1") as opened:
        yield from opened
