"""Two graphs of words and what they mean, as arrays that `data.path` reads.

    python examples/text_graphs.py packages packages.npz
    python examples/text_graphs.py wordnet wordnet.npz
    espalier train examples/graph-transformer.toml data.path=packages.npz

`packages`: those that apt knows on this machine. An edge leads from a package to one that depends on it, recommends or
suggests it, features count the words of its name and short description, the label is its section (`apt-get update`
brings the lists up to date). `wordnet`: WordNet (Fellbaum, 1998), of the Debian package wordnet-base. A node is a
synset (words that mean the same), an edge any relation (is a kind of, is part of, derives from, ...), features count
the words of the synset and of its definition, the label is the lexicographer's file (`noun.animal`, `verb.motion`).
Features are hashed into 512 columns, TF-IDF, rows of length one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from espalier.graph.data.import_graph import count_words, weighted

COLUMNS = 512
FEWEST = 30
"""Packages of a section that gets a label, so that training, validation and test each see some."""
RELATIONS = ("Depends", "Pre-Depends", "Recommends", "Suggests")
INSTALLED = Path("/usr/share/wordnet")
PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
"""Files of WordNet, and how relations name them (`s`, satellite adjectives, are in `adj` too)."""

_FIELD = re.compile(r"^([A-Za-z-]+): ?(.*)$")
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
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


def arrays(names: list[str], edges: set[tuple[int, int]], texts: list[str], labels: list[str]) -> dict[str, Any]:
    """What `numpy.savez` writes of a graph; an empty label is none."""
    counted = np.zeros((len(names), COLUMNS), np.float32)
    column = dict[bytes, int]()
    for row, text in zip(counted, texts, strict=True):
        count_words(text.lower().encode(), row, column)
    ends = np.array(sorted(edges), np.int64).reshape(-1, 2).T
    return {"edge_index": ends, "x": weighted(counted), "y": np.array(labels), "node_names": np.array(names)}


def packages(text: str) -> dict[str, Any]:
    """Of what `apt-cache dumpavail` prints: each package once, by name. A dependency on one of several packages is an
    edge to each; on a package that is not there, none."""
    fields: dict[str, dict[str, str]] = {}
    for paragraph in text.split("\n\n"):
        package = {match[1]: match[2] for match in map(_FIELD.match, paragraph.splitlines()) if match}
        if "Package" in package:
            fields.setdefault(package["Package"], package)
    names = sorted(fields)
    rows = {name: row for row, name in enumerate(names)}
    needed = {name: {need for field in RELATIONS for need in _named(fields[name].get(field, ""))} for name in names}
    edges = {(rows[need], rows[name]) for name in names for need in needed[name] if need in rows and need != name}
    sections = [fields[name].get("Section", "").rpartition("/")[2] for name in names]
    texts = [f"{name.replace('-', ' ')} {fields[name].get('Description', '')}" for name in names]
    counts = dict(zip(*np.unique(sections, return_counts=True), strict=True))
    return arrays(names, edges, texts, [section if counts[section] >= FEWEST else "" for section in sections])


def _named(relation: str) -> Iterator[str]:
    """Names in a list of relations such as `libc6 (>= 2.34), python3:any | python3-dev`."""
    for part in re.split(r"[,|]", relation):
        match = _NAME.match(part.strip())
        if match:
            yield match[0]


class Synset(NamedTuple):
    """One line of a data file. `key`: the file's letter and the offset in it; `relations`: to which keys."""

    key: str
    words: list[str]
    label: str
    relations: list[str]
    definition: str


def synsets(file: Path, letter: str) -> Iterator[Synset]:
    """Of a data file; `letter` of `PARTS`. Lines of its licence begin with a space."""
    for line in file.read_text(encoding="latin-1").splitlines():
        if line.startswith(" "):
            continue
        entry, _, definition = line.partition("|")
        fields = entry.split()
        words = int(fields[3], 16)
        relations = fields[5 + 2 * words :][: 4 * int(fields[4 + 2 * words])]
        ends = [
            f"{'a' if part == 's' else part}{at}" for at, part in zip(relations[1::4], relations[2::4], strict=True)
        ]
        yield Synset(letter + fields[0], fields[4 : 4 + 2 * words : 2], CLASSES[int(fields[1])], ends, definition)


def wordnet(folder: Path) -> dict[str, Any]:
    """Of the database in `folder`. Names are `word.part of speech.offset`."""
    every = [synset for name, letter in PARTS.items() for synset in synsets(folder / f"data.{name}", letter)]
    rows = {synset.key: row for row, synset in enumerate(every)}
    edges = {(rows[synset.key], rows[other]) for synset in every for other in synset.relations if other != synset.key}
    names = [f"{synset.words[0]}.{synset.key[0]}.{synset.key[1:]}" for synset in every]
    texts = [f"{re.sub('[_-]', ' ', ' '.join(synset.words))} {synset.definition.strip()}" for synset in every]
    return arrays(names, edges, texts, [synset.label for synset in every])


ABSENT = "neither installed nor to be had"


def dumped() -> str:
    """What apt says of all packages it knows. Exits where there is no apt, or its lists are empty."""
    if shutil.which("apt-cache") is None:
        raise SystemExit("There is no apt-cache here.")
    dump = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=True).stdout
    if not dump.strip():
        raise SystemExit("apt knows no packages; try: apt-get update")
    return dump.decode(errors="replace")


def fetched(folder: Path) -> Path:
    """The folder of WordNet's database, unpacked below `folder`. Exits where apt does not have it."""
    if shutil.which("apt-get") is None:
        raise SystemExit(f"WordNet is {ABSENT}: there is no apt-get here.")
    asked = ["apt-get", "download", "wordnet-base"]
    done = subprocess.run(asked, cwd=folder, capture_output=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"WordNet is {ABSENT}: {done.stderr.decode(errors='replace').strip()}")
    package = next(folder.glob("*.deb"))
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True, timeout=300)
    return folder / INSTALLED.relative_to("/")


def read(folder: Path) -> dict[str, Any]:
    """`wordnet` of the database in `folder`. Exits where a file is not what it should be."""
    try:
        return wordnet(folder)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise SystemExit(f"The database in {folder} cannot be read: {error!r}") from error


def written(name: str, file: Path) -> None:
    """Writes the graph `name`, packages or wordnet. WordNet is fetched by apt where it is not installed."""
    if name == "packages":
        np.savez(file, **packages(dumped()))
    elif (INSTALLED / "data.noun").exists():
        np.savez(file, **read(INSTALLED))
    else:
        with tempfile.TemporaryDirectory() as folder:
            np.savez(file, **read(fetched(Path(folder))))


if __name__ == "__main__":
    written(sys.argv[1], Path(sys.argv[2]))
