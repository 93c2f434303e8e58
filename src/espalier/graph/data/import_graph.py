"""Import graph (`python:imports`): the graph of the Python modules installed on this machine.

A node is a module, an edge leads from the imported module to the one that imports it, features count the identifiers in
its source (hashed into 256 columns, TF-IDF, rows of length one), the label is the distribution it came with (`python`
for the standard library). Distributions of few modules are left without a label: nothing could be learned of them.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import resolve_name
from typing import NamedTuple

import numpy as np
import xxhash

from espalier.graph.data.graph import IGNORED, Array, Graph, Progress
from espalier.recipe.cache_dir import CACHE, cache_folder, writing
from espalier.recipe.errors import UserError

COLUMNS = 256
"""Of the hashed identifiers: collisions are rare among the words that tell packages apart, and rows fit two pages."""

FEWEST = 30
"""Modules of a distribution that gets a label, so that training, validation and test each see some."""

READ = 1 << 16
"""Bytes of a source that are counted; imports are looked for in all of it."""

_IMPORT = re.compile(
    rb"^[ \t]*(?:import[ \t]+([^\n#;(]+)|from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n#;]+))", re.M
)
_WORD = re.compile(rb"[A-Za-z_]\w{2,}")
_NAME = re.compile(rb"[A-Za-z_][\w.]*")


class SourceModule(NamedTuple):
    """One source file: its dotted name, where it lies, and the distribution it belongs to."""

    name: str
    path: str
    owner: str
    package: bool


def load(progress: Progress | None = None) -> Graph:
    """The import graph, kept in the cache folder while no module changes. Edges lead from imported to importer."""
    modules = installed()
    if not modules:
        raise UserError("data.path = 'python:imports': no Python sources are installed here.", do="give another path")
    arrays = kept_arrays(f"imports-{_state(modules)}", lambda: _read(modules, progress))
    labels, classes = _labels(modules)
    return Graph.from_edges(
        **arrays,
        undirected=True,
        labels=labels,
        classes=classes,
        names=[module.name for module in modules],
        origin="python:imports",
    )


def installed() -> list[SourceModule]:
    """The modules of the standard library and of every distribution on the path, by name, each once."""
    modules = {}
    for root, owners in _roots():
        for path in _sources(root, set() if owners else _ELSEWHERE):
            parts = path[len(root) + 1 : -3].split(os.sep)
            if not all(part.isidentifier() for part in parts):
                continue
            package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if package else parts)
            if name and name not in modules:
                modules[name] = SourceModule(name, path, owners.get(parts[0], "") if owners else "python", package)
    return [modules[name] for name in sorted(modules)]


def _sources(root: str, outside: set[str]) -> Iterator[str]:
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name.isidentifier() and name not in {"__pycache__", *outside}]
        yield from (os.path.join(folder, name) for name in files if name.endswith(".py"))


_ELSEWHERE = {"site-packages", "dist-packages", "test", "idlelib", "lib2to3"}


def _roots() -> Iterator[tuple[str, dict[str, str]]]:
    """Folders of modules, and there the distribution of each top-level name (empty: the standard library)."""
    yield sysconfig.get_paths()["stdlib"], {}
    for place in dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib")):
        owners: dict[str, str] = {}
        for distribution in metadata.distributions(path=[place]):
            name = distribution.metadata["Name"]
            lines = (distribution.read_text("RECORD") or "").splitlines()
            for top in {line.partition(",")[0].partition("/")[0].removesuffix(".py") for line in lines}:
                owners.setdefault(top, name)
        if owners:
            yield place, owners


def _state(modules: list[SourceModule]) -> str:
    digest = xxhash.xxh3_128(f"{sys.version} {COLUMNS} {READ}".encode())
    for module in modules:
        status = os.stat(module.path)
        digest.update(f"{module.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _labels(modules: list[SourceModule]) -> tuple[Array, tuple[str, ...]]:
    owners = np.array([module.owner for module in modules])
    names, counts = np.unique(owners, return_counts=True)
    classes = [str(name) for name, count in zip(names, counts, strict=True) if count >= FEWEST and name]
    if len(classes) < 2:  # hardly anything is installed: parts of the standard library instead
        owners = np.array([module.name.partition(".")[0] for module in modules])
        names, counts = np.unique(owners, return_counts=True)
        classes = [str(names[at]) for at in np.argsort(-counts, kind="stable")[:8]]
    known = {name: at for at, name in enumerate(classes)}
    return np.array([known.get(owner, IGNORED) for owner in owners], np.int64), tuple(classes)


def _read(modules: list[SourceModule], progress: Progress | None) -> dict[str, Array]:
    known = {module.name: at for at, module in enumerate(modules)}
    counted = np.zeros((len(modules), COLUMNS), np.float32)
    sources = []
    targets = []
    column: dict[bytes, int] = {}
    for at, module in enumerate(modules):
        try:
            with open(module.path, "rb") as file:
                text = file.read()
        except OSError:
            continue  # not readable: a module without words and imports
        for imported in _imported(module, text):
            if (other := known.get(imported)) is not None and other != at:  # else a name in a module
                sources.append(other)
                targets.append(at)
        count_words(text[:READ], counted[at], column)
        if progress is not None and at % 64 == 0:
            progress(at, len(modules))
    ends = {"sources": np.array(sources, np.int64), "targets": np.array(targets, np.int64)}
    return {**ends, "features": weighted(counted)}


def _imported(module: SourceModule, text: bytes) -> Iterator[str]:
    """Dotted names a source imports, relative ones resolved; of `from a import b` also `a.b`, if there is one."""
    for plain, base, names in _IMPORT.findall(text):
        if plain:
            yield from (match.decode() for part in plain.split(b",") for match in _NAME.findall(part)[:1])
            continue
        start = _absolute(module, base.decode())
        if start is None:
            continue
        yield start
        for part in names.strip(b"()").split(b","):
            yield from (f"{start}.{match.decode()}".lstrip(".") for match in _NAME.findall(part)[:1])


def _absolute(module: SourceModule, base: str) -> str | None:
    package = module.name if module.package else module.name.rpartition(".")[0]
    try:
        return resolve_name(base, package)
    except ImportError:  # above the outermost package
        return None


def kept_arrays(name: str, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
    """What `make` returns, kept in the cache folder under `name`."""
    file = cache_folder() / "graphs" / f"{name}.npz"
    if file.exists():
        with np.load(file) as archive:
            return dict(archive)
    arrays = make()
    fresh = file.with_suffix(f".{os.getpid()}.tmp.npz")
    with writing(file, CACHE):
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(fresh, **arrays)  # type: ignore[arg-type]  # its stubs take the names for options
        fresh.replace(file)
    return arrays


def count_words(text: bytes, row: Array, column: dict[bytes, int]) -> None:
    """Adds the words of `text` to `row`, each hashed to a column, which `column` keeps."""
    for word in _WORD.findall(text):
        at = column.get(word)
        if at is None:
            at = column[word] = xxhash.xxh32_intdigest(word) % len(row)
        row[at] += 1


def weighted(counted: Array) -> Array:
    """TF-IDF, rows of length one (Salton and Buckley, 1988): log-damped counts, columns that all have count little."""
    spread = np.log((1 + len(counted)) / (1 + (counted > 0).sum(0))) + 1
    rows = np.log1p(counted) * spread.astype(np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return rows.astype(np.float32)
