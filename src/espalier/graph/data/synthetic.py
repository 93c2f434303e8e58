"""Synthetic graphs, seeded and streamed to disk: R-MAT, and planted partitions with uneven degrees.

After R-MAT (Chakrabarti et al., SDM 2004, with Graph500's quadrants) and the degree-corrected block model (Karrer and
Newman, arXiv 1008.3926). Edges are drawn in chunks, each a pure function of (seed, chunk) (Philox, Salmon et al., SC
2011), divided by ranges of their targets into files, and sorted range by range: memory does not grow with the graph,
and the disk is read and written in sequence.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from espalier.graph.data.graph import Array, DataSplit, Graph, Progress
from espalier.recipe.cache_dir import writing
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.foreign_files import parsing
from espalier.recipe.offsets import offsets_of

Edges = tuple[Array, Array]

TRAIN = 0.8
"""The share of nodes to train on."""
CHUNK = 1 << 20
"""Edges drawn at once: tens of MiB."""
_PIECE = 1 << 16  # rows of features drawn at once

_ROWS = 1 << 22  # edges sorted at once
_RANGES = 256  # files that are open at once; beyond, more edges are sorted at once


@dataclass(frozen=True)
class Rmat:
    """2^scale nodes with `degree` edges each on average, before duplicates are dropped; `features` columns.

    The label is the quadrant of three levels, one of eight, in which R-MAT's recursion puts a node.
    """

    scale: int = 16
    degree: int = 16
    features: int = 64
    train: float = TRAIN
    seed: int = 1

    nodes = property(lambda self: 1 << self.scale)
    classes = property(lambda self: 8)

    def labels(self, ids: Array) -> Array:
        """Of nodes: the three highest bits of their place before it is scrambled."""
        return _unscrambled(ids, self.scale) >> max(0, self.scale - 3)

    def edges(self, chunk: int, count: int) -> Edges:
        """`count` edges: at each of `scale` levels a quadrant, by 0.57, 0.19, 0.19, 0.05 (Graph500)."""
        random = _random(self.seed, 1, chunk)
        ends = np.zeros((2, count), np.int64)
        for _ in range(self.scale):
            draw = random.random(count, np.float32)
            ends[0] = ends[0] * 2 + (draw >= 0.76)
            ends[1] = ends[1] * 2 + (((draw >= 0.57) & (draw < 0.76)) | (draw >= 0.95))
        return _scrambled(ends[0], self.scale), _scrambled(ends[1], self.scale)


@dataclass(frozen=True)
class Planted:
    """`classes` groups whose members meet their own with probability `homophily`, else anybody.

    Within a group the node of rank r is met as often as r^(1/skew - 1): 1 is even, 2 has hubs. Features are the mean of
    the group, of length `signal`, and noise of variance one.
    """

    nodes: int = 10_000
    degree: int = 16
    classes: int = 10
    features: int = 64
    homophily: float = 0.6
    skew: float = 1.5
    signal: float = 1.0
    train: float = TRAIN
    seed: int = 1

    def labels(self, ids: Array) -> Array:
        """Of nodes: their number modulo the classes."""
        return ids % self.classes

    def edges(self, chunk: int, count: int) -> Edges:
        """`count` edges between ranks drawn by their weight."""
        random = _random(self.seed, 1, chunk)
        groups = random.integers(self.classes, size=(2, count))
        same = random.random(count) < self.homophily
        groups[1, same] = groups[0, same]
        ranks = random.random((2, count)) ** self.skew
        sizes = (self.nodes - groups + self.classes - 1) // self.classes
        ids = groups + self.classes * (ranks * sizes).astype(np.int64)
        return ids[0], ids[1]


KINDS: dict[str, Any] = {"rmat": Rmat, "planted": Planted}

Made = Rmat | Planted


def parse(text: str) -> Made:
    """`rmat:scale=20,degree=16` or `planted:nodes=1000000,classes=20`. Raises UserError."""
    kind, _, rest = text.partition(":")
    known = {field.name: field.type for field in fields(KINDS[kind])}
    given = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            near = nearest(name, known)
            raise UserError(
                f"data.path = {text!r}: {part!r} is not known.",
                do=f"{near or next(iter(known))}=…, of {', '.join(known)}",
            )
        try:
            given[name] = float(value) if known[name] == "float" else int(value)
        except ValueError:
            raise UserError(f"data.path = {text!r}: {name} = {value!r} is not a number.", do=f"{name}=16") from None
    made: Made = KINDS[kind](**given)
    _check(made, text)
    return made


def _check(made: Made, text: str) -> None:
    for name, value in asdict(made).items():
        if value < 0 or (value == 0 and name not in ("seed", "homophily", "signal")):
            raise UserError(f"data.path = {text!r}: {name} = {value} is not possible.", do=f"{name} above 0")
    if made.train > TRAIN:
        raise UserError(
            f"data.path = {text!r}: train = {made.train} of the nodes is not possible.",
            why="validation and test have a tenth of them each",
            do="train = 0.8 at most",
        )
    if isinstance(made, Rmat) and made.scale > 40:
        raise UserError(f"data.path = {text!r}: scale = {made.scale} is more than 2^40 nodes.", do="scale=20")
    if isinstance(made, Planted) and (made.homophily > 1 or made.classes > made.nodes):
        raise UserError(f"data.path = {text!r} is not possible.", do="homophily up to 1, classes up to the nodes")


def load(text: str, cache: Path, progress: Progress | None = None) -> Graph:
    """The graph that `text` describes, made in `cache` on first use and then opened from there."""
    made = parse(text)
    key = identity(made)
    folder = cache / f"{text.partition(':')[0]}-{key}"
    if not is_store(folder):
        write(made, folder, progress)
    return opened(folder)


def identity(made: Made) -> str:
    """The hash of the options. A default `train` is left out, which graphs of earlier versions do not have."""
    options = repr(made).replace(f", train={TRAIN}", "")
    return xxhash.xxh3_64_hexdigest(options.encode())


def is_store(folder: Path) -> bool:
    """Whether a generated graph lies in `folder`, complete."""
    return (folder / "graph.json").exists()


def opened(folder: Path) -> Graph:
    """The graph in `folder`; its arrays stay on disk and are read where they are touched."""
    about = json.loads((folder / "graph.json").read_text())

    def array(name: str) -> Array:
        with parsing(folder / f"{name}.npy", "copy the file again, or remove the folder to have it made anew"):
            return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False))

    def optional(name: str) -> Array | None:
        return array(name) if (folder / f"{name}.npy").exists() else None

    indptr = array("indptr")
    features = array("features")
    labels = array("labels")
    for name, rows in (("features", features), ("labels", labels)):
        if len(rows) != len(indptr) - 1:
            raise UserError(
                f"{folder / name}.npy has {len(rows):,} rows for {len(indptr) - 1:,} nodes.",
                do="give each node a row, in the order of indptr.npy",
            )
    return Graph(
        indptr,
        array("indices"),
        features,
        labels=labels,
        parts=DataSplit(array("train"), array("validation"), array("test")),
        weights=optional("weights"),
        edge_features=optional("edge_features"),
        classes=tuple(map(str, range(about["classes"]))),
        origin=about["made"],
        identity=about["identity"],
    )


def write(made: Made, folder: Path, progress: Progress | None = None) -> None:
    """Makes the graph in `folder`: undirected, duplicates and loops dropped, a share `train` of the nodes to train on,
    a tenth for validation and test each. Interrupted, it leaves nothing that could be taken for a graph."""
    fresh = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        with writing(folder.parent, "data.cache = a disk with room"):
            fresh.mkdir(parents=True)
            _write_edges(made, fresh, progress)
            _write_nodes(made, fresh)
            about = {"made": repr(made), "classes": made.classes, "identity": identity(made)}
            (fresh / "graph.json").write_text(json.dumps(about))
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


class _NpyFile:
    """An .npy file written row by row: its length need not be known. Has state: the rows so far."""

    def __init__(self, path: Path, dtype: Any, columns: int = 0) -> None:
        self.dtype = np.dtype(dtype)
        self.columns = columns
        self.rows = 0
        self._file = path.open("wb")
        self._header()

    def _header(self) -> None:  # as long for any number of rows: NumPy leaves room in it
        shape = (self.rows, self.columns) if self.columns else (self.rows,)
        about = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, about)

    def append(self, rows: Array) -> None:
        np.ascontiguousarray(rows, self.dtype).tofile(self._file)
        self.rows += len(rows)

    def __enter__(self) -> _NpyFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._header()


def _write_edges(made: Made, folder: Path, progress: Progress | None) -> None:
    total = made.nodes * made.degree // 2
    kind = np.dtype(np.int32 if made.nodes < 2**31 else np.int64)
    bounds = _ranges(made, total)
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"range-{at}").open("wb", buffering=0)) for at in range(len(bounds) - 1)]
        for done, pair in enumerate(_chunks(made, total)):
            for sources, targets in (pair, pair[::-1]):
                _divide(np.stack([targets, sources], 1).astype(kind), bounds, files)
            if progress is not None:
                progress(done * CHUNK, 2 * total)
    with _NpyFile(folder / "indptr.npy", np.int64) as indptr, _NpyFile(folder / "indices.npy", kind) as indices:
        indptr.append(np.zeros(1, np.int64))
        for at, (start, stop) in enumerate(pairwise(bounds)):
            path = folder / f"range-{at}"
            ends = np.fromfile(path, kind).reshape(-1, 2)
            path.unlink()
            keys = np.unique((ends[:, 0] - start) * np.int64(made.nodes) + ends[:, 1])
            owners = keys // made.nodes
            indptr.append(indices.rows + np.cumsum(np.bincount(owners, minlength=stop - start)))
            indices.append(keys - owners * made.nodes)
            if progress is not None:
                progress(total + total * (at + 1) // len(files), 2 * total)


def _ranges(made: Made, total: int) -> Array:
    """int64: where ranges of targets begin that have about `_ROWS` edges each, as the first chunk lets expect."""
    ends = np.sort(np.concatenate(next(_chunks(made, total), (np.zeros(0, np.int64),))))
    count = min(_RANGES, -(-2 * total // _ROWS), max(1, len(ends)))
    inner = ends[np.arange(1, count) * len(ends) // count] if count > 1 else np.zeros(0, np.int64)
    return np.unique(np.concatenate([[0], inner, [made.nodes]])).astype(np.int64)


def _chunks(made: Made, total: int) -> Iterator[Edges]:
    for chunk in range(-(-total // CHUNK)):
        sources, targets = made.edges(chunk, min(CHUNK, total - chunk * CHUNK))
        apart = sources != targets
        yield sources[apart], targets[apart]


def _divide(ends: Array, bounds: Array, files: Sequence[FileIO]) -> None:
    """Appends each (target, source) to the file of the target's range."""
    place = np.searchsorted(bounds, ends[:, 0], side="right") - 1
    ends = ends[np.argsort(place, kind="stable")]
    cuts = offsets_of(np.bincount(place, minlength=len(files)))
    for file, start, stop in zip(files, cuts[:-1], cuts[1:], strict=True):
        file.write(ends[start:stop].data)


def _write_nodes(made: Made, folder: Path) -> None:
    means = _random(made.seed, 2, 0).normal(size=(made.classes, made.features))
    means *= getattr(made, "signal", 1.0) / np.linalg.norm(means, axis=1, keepdims=True)
    shares = {"train": (0.0, made.train), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
    with ExitStack() as stack:

        def begin(name: str, dtype: Any = np.int64, columns: int = 0) -> _NpyFile:
            return stack.enter_context(_NpyFile(folder / f"{name}.npy", dtype, columns))

        labels = begin("labels")
        features = begin("features", np.float32, made.features)
        parts = {name: begin(name) for name in shares}
        for chunk, at in enumerate(range(0, made.nodes, CHUNK)):
            ids = np.arange(at, min(at + CHUNK, made.nodes))
            labels.append(made.labels(ids))
            noise = _random(made.seed, 3, chunk)
            for piece in np.split(ids, range(_PIECE, len(ids), _PIECE)):
                rows = noise.standard_normal((len(piece), made.features), np.float32)
                features.append(rows + means[made.labels(piece)].astype(np.float32))
            drawn = _random(made.seed, 4, chunk).random(len(ids))
            for name, (low, high) in shares.items():
                parts[name].append(ids[(drawn >= low) & (drawn < high)])


def _random(seed: int, purpose: int, chunk: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed * 8 + purpose, counter=[0, 0, 0, chunk]))


def _scrambled(ids: Array, scale: int) -> Array:
    """A permutation of [0, 2^scale): neighbours in number are no neighbours in the graph (an odd factor, arithmetic
    modulo 2^scale; 0x9E3779B1 is Knuth's, 2^32 over the golden ratio)."""
    return (ids * 0x9E3779B1) & ((1 << scale) - 1)


def _unscrambled(ids: Array, scale: int) -> Array:
    inverse = pow(0x9E3779B1, -1, 1 << scale) if scale else 0
    # Products of two numbers of up to 40 bits wrap around 2^64, which leaves the low bits right.
    return (ids * np.int64(inverse)) & ((1 << scale) - 1)
