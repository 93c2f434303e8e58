"""Package graph (`debian:packages`): the packages that apt knows on this machine.

A node is a package, an edge leads from a package to one that depends on it, recommends or suggests it, features count
the words of its name and short description (hashed into 512 columns, TF-IDF, rows of length one), the label is its
section. `apt-get update` brings the lists up to date; apt answers without a network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

import numpy as np
import xxhash

from espalier.graph.data.graph import IGNORED, Array, Graph, Progress
from espalier.graph.data.import_graph import count_words, kept_arrays, weighted
from espalier.recipe.errors import UserError

COLUMNS = 512
FEWEST = 30
"""Packages of a section that gets a label, so that training, validation and test each see some."""
RELATIONS = ("Depends", "Pre-Depends", "Recommends", "Suggests")

_FIELD = re.compile(r"^([A-Za-z-]+): ?(.*)$")
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")


def load(progress: Progress | None = None) -> Graph:
    """The package graph, kept in the cache folder while apt's lists do not change. Edges lead from the package that is
    needed to the one that needs it.

    Raises UserError where there is no apt, or it knows no package.
    """
    text = available()
    name = f"debian-{xxhash.xxh3_128_hexdigest(text)[:16]}"
    arrays = kept_arrays(name, lambda: read(text.decode(errors="replace"), progress))
    return Graph.from_edges(
        **{**arrays, "classes": tuple(arrays["classes"].tolist()), "names": arrays["names"].tolist()},
        undirected=True,
        origin="debian:packages",
    )


def available() -> bytes:
    """What `apt-cache dumpavail` prints. Raises UserError."""
    if shutil.which("apt-cache") is None:
        raise UserError(
            "data.path = 'debian:packages': there is no apt-cache here.",
            why="the graph is that of the packages of a Debian or Ubuntu machine",
            do="'python:imports', the graph of installed Python modules",
        )
    process = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, check=False)
    if process.returncode or not process.stdout.strip():
        raise UserError(
            "data.path = 'debian:packages': apt knows no packages.",
            why=process.stderr.decode(errors="replace").strip() or "its lists are empty",
            do="apt-get update",
        )
    return process.stdout


def paragraphs(text: str) -> Iterator[dict[str, str]]:
    """Fields of each package; lines that continue a field are left out, none of those read here has any."""
    for part in text.split("\n\n"):
        matches = (_FIELD.match(line) for line in part.splitlines())
        fields = {match.group(1): match.group(2) for match in matches if match}
        if "Package" in fields:
            yield fields


def read(text: str, progress: Progress | None = None) -> dict[str, Array]:
    """Arrays `sources`, `targets`, `features`, `labels`, `classes` and `names` of the packages of `text`, each once, by
    name. A dependency on one of several packages is an edge to each; on a package that is not there, none."""
    packages: dict[str, dict[str, str]] = {}
    for package in paragraphs(text):
        packages.setdefault(package["Package"], package)
    names = sorted(packages)
    known = {name: at for at, name in enumerate(names)}
    counted = np.zeros((len(names), COLUMNS), np.float32)
    column = dict[bytes, int]()
    ends = []
    for at, name in enumerate(names):
        package = packages[name]
        for other in {known.get(need) for field in RELATIONS for need in _named(package.get(field, ""))} - {None, at}:
            assert other is not None
            ends.append((other, at))
        words = f"{name.replace('-', ' ')} {package.get('Description', '')}".lower()
        count_words(words.encode(), counted[at], column)
        if progress is not None and at % 1024 == 0:
            progress(at, len(names))
    sections = np.array([packages[name].get("Section", "").rpartition("/")[2] for name in names])
    classes = np.array(
        [
            section
            for section, count in zip(*np.unique(sections, return_counts=True), strict=True)
            if count >= FEWEST and section
        ]
    )
    place = {str(name): at for at, name in enumerate(classes)}
    labels = np.array([place.get(str(section), IGNORED) for section in sections], np.int64)
    sources, targets = np.array(sorted(ends), np.int64).reshape(-1, 2).T
    return {
        **{"sources": sources, "targets": targets, "features": weighted(counted), "labels": labels},
        **{"classes": classes.astype(str), "names": np.array(names)},
    }


def _named(relation: str) -> Iterator[str]:
    """Names in a list of relations such as `libc6 (>= 2.34), python3:any | python3-dev`."""
    for part in re.split(r"[,|]", relation):
        match = _NAME.match(part.strip())
        if match:
            yield match.group()
