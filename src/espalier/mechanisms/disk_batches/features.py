"""Feature files: rows of node features as people have them, opened without being read.

A `.npy` file, a raw binary file with its dtype and shape, a folder of shards (`part-0.npy`, `part-1.npy`, …), Parquet,
and the folders of OGB, OGB-LSC and GraphBolt's on-disk data sets. Files are read past the page cache; Parquet and OGB's
`.csv.gz` have to be decoded.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from espalier.graph.data.graph import Array
from espalier.recipe import data_hash
from espalier.recipe.errors import UserError, missing_extra, nearest
from espalier.recipe.foreign_files import parsing
from espalier.recipe.offsets import offsets_of
from espalier.store import base
from espalier.store.base import Rows
from espalier.store.cost import PAGE
from espalier.store.direct_io import DirectFile, aligned, checksum
from espalier.store.io_queue import IoQueue
from espalier.store.memory import MemoryRows
from espalier.store.rows import RowFile, RowLayout

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8)
}
"""What rows may consist of, by name."""
KNOWN = "a .npy or .parquet file, a raw file beside NAME.json, a folder of shards, OGB, OGB-LSC or GraphBolt"
_SINGLE = ("features.npy", "node_feat.npy", "node-feat.npy", "feat.npy", "x.npy")
_LSC = ("processed/paper/node_feat.npy", "paper/node_feat.npy")  # MAG240M and IGB


def rows_of(table: Rows, ids: Tensor | Array) -> Tensor:
    """[ids, ...]: the rows `ids` (int64) of a table."""
    ids = torch.as_tensor(ids)
    rows = torch.empty(len(ids), *table.shape, dtype=table.dtype)
    table.read(ids, rows)
    return rows


class Features(Rows, Protocol):
    """Node features, a row of `shape` (width,) for each node. `sources`: the files, none for a table in memory."""

    sources: tuple[Path, ...]

    def consecutive(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop), [stop - start, width]: to be read only."""


def identity(features: Features) -> dict[str, str]:
    """What the manifest keeps of features: size, dtype and the hashes of their files, or of the rows in memory."""
    hashes = data_hash.hashes({path.name: path for path in features.sources})
    if isinstance(features, FeatureTable) and not hashes:
        hashes = {"rows": f"{checksum(features.table.contiguous()):x}"}
    return {"rows and width": f"{len(features)} x {features.shape[0]}", "dtype": str(features.dtype), **hashes}


@dataclass(frozen=True)
class Part:
    """Rows that lie one after the other in a file, from byte `offset` on."""

    path: Path
    offset: int
    rows: int


class _Pieces(ABC):
    """Rows that lie in pieces, one after the other: `counts` says how many in each."""

    def __init__(self, sources: Sequence[Path], counts: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self.sources = tuple(sources)
        self.dtype = dtype
        self.shape: tuple[int, ...] = (width,)
        self._starts = offsets_of(counts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def row_bytes(self) -> int:
        return base.row_bytes(self.dtype, self.shape)

    def read(self, ids: Tensor, out: Tensor) -> None:
        """See Rows. Rows of a piece are read together."""
        base.check_request(self, ids, out)
        starts = torch.from_numpy(self._starts)
        piece = torch.searchsorted(starts, ids, right=True) - 1
        for at in piece.unique().tolist():
            mine = piece == at
            out[mine] = self._rows(at, ids[mine] - starts[at])

    @abstractmethod
    def _rows(self, piece: int, ids: Tensor) -> Tensor:
        """Rows of one piece, by their places in it."""


class FeatureFiles(_Pieces):
    """Rows in one file or several. Holds the files open. Raises UserError where a file is too short."""

    def __init__(self, parts: Sequence[Part], width: int, dtype: torch.dtype) -> None:
        super().__init__([part.path for part in parts], [part.rows for part in parts], width, dtype)
        self.parts = tuple(parts)
        self._files = [DirectFile(part.path, "read") for part in parts]
        for part, file in zip(self.parts, self._files, strict=True):
            end = part.offset + part.rows * self.row_bytes
            if file.size < end:
                raise UserError(
                    f"{part.path} is too short: {part.rows:,} rows of {self.row_bytes} bytes end at {end:,}, and it "
                    f"has {file.size:,}.",
                    why=f"{end - file.size:,} bytes are missing; it was cut, is still being written, or its dtype is "
                    "another",
                    do="copy the file again, or check dtype and shape",
                )

    def consecutive(self, start: int, stop: int) -> Tensor:
        """See Features. Whole pages are read, several transfers at once."""
        pieces = []
        for at, part in enumerate(self.parts):
            first = max(start, int(self._starts[at]))
            last = min(stop, int(self._starts[at + 1]))
            if first < last:
                begin = part.offset + (first - int(self._starts[at])) * self.row_bytes
                pieces.append(self._read(at, begin, (last - first) * self.row_bytes))
        rows = pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *pieces])
        return rows.view(self.dtype).view(-1, *self.shape)

    def _read(self, part: int, begin: int, size: int) -> Tensor:
        """uint8 [size]: bytes of a file from `begin` on."""
        skipped = begin % PAGE
        pages = aligned(skipped + size)
        self._queue.read(self._files[part], begin - skipped, pages, skipped + size).result()
        content = pages[skipped : skipped + size]
        return content if skipped % self.dtype.itemsize == 0 else content.clone()

    def read(self, ids: Tensor, out: Tensor) -> None:
        """See Rows. Pages that rows share are read once; those of a single file lie in `out` at once."""
        if len(self.parts) > 1:
            super().read(ids, out)
        else:
            self._tables[0].read(ids, out)

    def _rows(self, piece: int, ids: Tensor) -> Tensor:
        return rows_of(self._tables[piece], ids)

    @cached_property
    def _queue(self) -> IoQueue:
        return IoQueue()

    @cached_property
    def _tables(self) -> list[RowFile]:
        layouts = [RowLayout(part.rows, self.dtype, self.shape, part.offset) for part in self.parts]
        return [RowFile(file, layout, self._queue) for file, layout in zip(self._files, layouts, strict=True)]


class FeatureTable(MemoryRows):
    """Rows that are a tensor [rows, width]: in memory, or mapped from `sources`."""

    def __init__(self, rows: Tensor, sources: Sequence[Path] = ()) -> None:
        super().__init__(rows)
        self.sources = tuple(sources)

    def consecutive(self, start: int, stop: int) -> Tensor:
        return self.table[start:stop]


class ParquetFeatures(_Pieces):
    """Rows in Parquet: a column for each feature, or one column of lists. Holds the row group read last."""

    def __init__(self, files: Sequence[Path]) -> None:
        try:
            from pyarrow import parquet
        except ImportError:
            raise missing_extra("pyarrow", "graph", f"{files[0]}") from None
        self._groups: list[tuple[Any, int]] = []  # (file, row group)
        counts: list[int] = []
        for path in files:
            with parsing(path, f"give {KNOWN}"):
                file = parquet.ParquetFile(path)
            self._groups += [(file, group) for group in range(file.num_row_groups)]
            counts += [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        self._kept: tuple[int, Tensor] = (-1, torch.empty(0))
        super().__init__(files, counts, 0, torch.float32)
        if counts:
            self.shape = tuple(self._group(0).shape[1:])

    def consecutive(self, start: int, stop: int) -> Tensor:
        return rows_of(self, torch.arange(start, stop))

    def _rows(self, piece: int, ids: Tensor) -> Tensor:
        return self._group(piece)[ids]

    def _group(self, at: int) -> Tensor:
        if self._kept[0] != at:
            file, group = self._groups[at]
            table = file.read_row_group(group)
            columns = [column.combine_chunks() for column in table.columns]
            with parsing(self.sources[0], "a column of numbers for each feature, or one column of lists of one length"):
                if len(columns) == 1 and "list" in str(columns[0].type):
                    columns = [_of_one_length(columns[0]).flatten()]
                rows = np.stack([column.to_numpy(zero_copy_only=False) for column in columns], 1).astype(np.float32)
                self._kept = (at, torch.from_numpy(rows.reshape(len(table), -1)))
        return self._kept[1]


def _of_one_length(lists: Any) -> Any:
    if hasattr(lists, "value_lengths") and len(lists.value_lengths().unique()) > 1:
        raise ValueError("the lists differ in length")
    return lists


# --- opening ---------------------------------------------------------------------------------------------------------


def open_features(
    path: str | Path, *, dtype: str | None = None, shape: tuple[int, int] | None = None, nodes: int | None = None
) -> Features:
    """The features at `path`.

    Args:
        path: a file or a folder; see the top of this file.
        dtype, shape: of a raw file; left out, `NAME.json` beside it says them ({"dtype": "float16", "shape": [5, 3]}).
        nodes: rows there must be.

    Raises:
        UserError: nothing known lies there, a file is too short, dtypes or widths of shards differ, other rows than
            nodes.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise UserError(f"The features {place} do not exist.", do=f"name {KNOWN}")
    with parsing(place, f"name {KNOWN}"):
        features = _folder(place) if place.is_dir() else _file(place, dtype, shape)
    if nodes is not None and len(features) != nodes:
        raise UserError(
            f"{place} holds {len(features):,} rows of features for {nodes:,} nodes.",
            why=f"its rows are of {features.shape[0]} x {str(features.dtype).removeprefix('torch.')}",
            do="give each node a row; for a raw file check its dtype and shape",
        )
    return features


def _file(path: Path, dtype: str | None = None, shape: Sequence[int] | None = None) -> Features:
    ending = path.suffix.lower()
    if ending == ".npy":
        return _arrays([path])
    if ending == ".parquet":
        return ParquetFeatures([path])
    if ending == ".npz":
        return _npz(path)
    sidecar = path.with_name(path.name + ".json")
    if (dtype is None or shape is None) and sidecar.exists():
        with parsing(sidecar, _ASIDE):
            header = json.loads(sidecar.read_text(encoding="utf-8"))
            dtype = dtype or header["dtype"]
            shape = shape or header["shape"]
    if dtype is None or shape is None:
        raise UserError(f"{path} is a raw file, and its dtype and shape are not known.", do=f"{sidecar.name}: {_ASIDE}")
    return _raw(path, dtype, shape)


_ASIDE = '{"dtype": "float32", "shape": [nodes, width]}'


def _raw(path: Path, dtype: str, shape: Sequence[int]) -> FeatureFiles:
    if dtype not in DTYPES:
        near = nearest(dtype, DTYPES) or "float32"
        raise UserError(f"{path}: the dtype {dtype!r} is not known.", why=f"there are {', '.join(DTYPES)}", do=near)
    if len(shape) != 2 or min(shape) < 0 or not all(type(length) is int for length in shape):
        raise UserError(f"{path}: {list(shape)} is no shape of rows.", do="two whole numbers, [nodes, width]")
    row = shape[1] * DTYPES[dtype].itemsize
    size = path.stat().st_size
    if size > shape[0] * row:
        raise UserError(
            f"{path} has {size:,} bytes, more than {shape[0]:,} rows of {row} bytes.",
            why=f"{size / max(1, shape[0]):.6g} bytes per row are not {shape[1]} x {dtype}",
            do="check dtype and shape",
        )
    return FeatureFiles([Part(path, 0, shape[0])], shape[1], DTYPES[dtype])


def _folder(folder: Path) -> Features:
    for name in (*_SINGLE, *_LSC):
        if (folder / name).exists():
            return _arrays([folder / name])
    for name in ("preprocessed/metadata.yaml", "metadata.yaml"):
        if (folder / name).exists():
            return _graphbolt(folder / name)
    if (folder / "raw" / "data.npz").exists():
        return _npz(folder / "raw" / "data.npz")
    if (folder / "raw" / "node-feat.csv.gz").exists():
        file = folder / "raw" / "node-feat.csv.gz"
        return FeatureTable(torch.from_numpy(np.loadtxt(file, np.float32, delimiter=",", ndmin=2)), [file])
    shards: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir(), key=_natural):
        if path.suffix.lower() in (".npy", ".parquet") and re.search(r"\d", path.stem):
            shards.setdefault(re.sub(r"\d+", "#", path.name), []).append(path)
    if len(shards) == 1:
        ((_, files),) = shards.items()
        return ParquetFeatures(files) if files[0].suffix.lower() == ".parquet" else _arrays(files)
    why = f"shards of {', '.join(shards)} lie there" if shards else f"looked for {', '.join(_SINGLE)} and shards"
    raise UserError(f"{folder} holds no features that are known.", why=why, do=f"name {KNOWN}")


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts `part-2` before `part-10`."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", path.name)]


def _arrays(files: Sequence[Path]) -> FeatureFiles:
    """`.npy` files one after the other."""
    parts = []
    kinds = []
    for path in files:
        with path.open("rb") as file:
            part, width, dtype = _header(file, path)
        parts.append(part)
        kinds.append((width, dtype))
        if kinds[-1] != kinds[0]:
            (a, first), (b, other) = kinds[0], kinds[-1]
            raise UserError(
                f"{path} has rows of {b} x {str(other).removeprefix('torch.')}.",
                why=f"{files[0].name}, the first shard, has {a} x {str(first).removeprefix('torch.')}",
                do="write all shards with one width and one dtype",
            )
    return FeatureFiles(parts, *kinds[0])


def array_header(file: IO[bytes]) -> tuple[Any, bool, np.dtype[Any]]:
    """(shape, whether by columns, dtype) of the `.npy` file whose header begins where `file` stands."""
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    return read[np.lib.format.read_magic(file)[0]](file)


def _header(file: IO[bytes], path: Path) -> tuple[Part, int, torch.dtype]:
    """Reads the header of a `.npy` file at the place where `file` stands."""
    with parsing(path, "numpy.save(path, features)"):
        shape, fortran, dtype = array_header(file)
    name = "bfloat16" if dtype.str == "|V2" else dtype.name  # NumPy writes bfloat16 as two bytes of void
    if len(shape) != 2 or fortran or name not in DTYPES or not dtype.isnative:
        form = f"{list(shape)} of {dtype.newbyteorder('=') if dtype.isnative else dtype.str}"
        raise UserError(
            f"{path} holds {form}{' by columns' if fortran else ''}.",
            why=f"features are [nodes, width] by rows, of {', '.join(DTYPES)}",
            do="numpy.save(path, numpy.ascontiguousarray(features, numpy.float32))",
        )
    return Part(path, file.tell(), shape[0]), shape[1], DTYPES[name]


def _npz(path: Path) -> FeatureFiles:
    """The array `node_feat` (OGB) or `x` inside a `.npz`, which numpy.savez stores as it is."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in ("node_feat.npy", "features.npy", "x.npy") if name in archive.namelist()]
        if not names or archive.getinfo(names[0]).compress_type != zipfile.ZIP_STORED:
            raise UserError(
                f"{path} holds no features that can be read in place.",
                why="they are compressed" if names else f"it has {', '.join(archive.namelist())}, and no node_feat",
                do="numpy.save('node_feat.npy', numpy.load(path)['node_feat'])",
            )
        start = archive.getinfo(names[0]).header_offset
    with path.open("rb") as file:
        file.seek(start + 26)  # the local header: 30 bytes, the last four of which say how long name and extra are
        file.seek(start + 30 + sum(struct.unpack("<HH", file.read(4))))
        part, width, dtype = _header(file, path)
    return FeatureFiles([part], width, dtype)


def _graphbolt(metadata: Path) -> Features:
    """The first node feature that GraphBolt's `metadata.yaml` names, of the type without a name or the first type."""
    try:
        import yaml
    except ImportError:
        raise missing_extra("pyyaml", "graph", f"{metadata}") from None
    with parsing(metadata, "feature_data with domain: node"):
        listing = yaml.safe_load(metadata.read_text(encoding="utf-8"))
        listed: list[Mapping[str, Any]] = [entry for entry in listing["feature_data"] if entry["domain"] == "node"]
        chosen = sorted(
            listed, key=lambda entry: (entry["name"] not in ("feat", "features", "x"), bool(entry.get("type")))
        )
        name = chosen[0]["path"]
        form = chosen[0].get("format", "numpy")
    places = [metadata.parent.parent / name, metadata.parent / name]  # DGL's paths begin at the data set's folder
    place = next((path for path in places if path.exists()), None)
    if place is None:
        why = f"{metadata} names it, and neither {places[0]} nor {places[1]} is there"
        raise UserError(f"The features {name} are missing.", why=why, do="copy the data set again, with all its files")
    if form == "torch":
        return FeatureTable(torch.load(place, weights_only=True, mmap=True), [place])
    return _arrays([place])
