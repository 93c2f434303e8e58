"""Adaptive-Package: rows of codes of different widths and sparsity, in packages of 64, 128 or 192 bits. After MEGA
(Zhu et al., HPCA 2024, arXiv 2311.09775, section IV).

A package is `mode (2 bits) | width - 1 (3 bits) | codes | zeros`, lowest bits first: the mode tells its length (0: 64,
1: 128, 2: 192), a code never straddles two packages. Only codes that are not 0 are stored; which those are stands in a
bitmap, or (our mode `index`) in lists of columns, which are shorter where few are left; `dense` stores all codes and no
list. Consecutive rows of one width share packages. So that widths which alternate from row to row do not close a
package at each, blocks of 256 rows are stored in the order of their widths, rising in one block and falling in the
next; the order follows from the widths and takes nothing. The file is in `package_file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from espalier.kernels.step_codes import STEPS
from espalier.mechanisms.few_bits.a2q import Coded
from espalier.recipe.errors import UserError
from espalier.recipe.offsets import offsets_of

Array = NDArray[Any]
Occupied = Literal["bitmap", "index", "dense"]
OCCUPIED: tuple[Occupied, ...] = ("bitmap", "index", "dense")

GROUP = 256
"""Rows of an entry of the index, and of a block that is ordered by width."""
HEADER = 5
"""Bits of a package's header."""


def capacity(words: Any, width: Any) -> Any:
    """Codes of `width` bits in a package of so many 64-bit words."""
    return (64 * words - HEADER) // width


def optimal(codes: int, width: int) -> list[int]:
    """Words of packages that hold so many codes in the least space: long ones, and at most one or two shorter ones of
    one length, since three, or a short beside a middle one, are never better than longer ones of as many words."""
    cuts = []
    for ends in ([], [1], [2], [1, 1], [2, 2]):
        rest = max(0, codes - sum(capacity(words, width) for words in ends))
        cuts.append([3] * -(-rest // capacity(3, width)) + ends)
    return min(cuts, key=sum)


@dataclass(frozen=True)
class Sizes:
    """Bits of a packed matrix by what they are for; together the file's, less what is around the matrix."""

    payload: int
    header: int
    padding: int
    bitmap: int
    index: int
    steps: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))


@dataclass(frozen=True)
class PackedRows:
    """A matrix of codes in packages.

    Attributes:
        rows, columns, signed: of the codes (int8 or uint8).
        occupied: how the columns of stored codes are told.
        streams: uint8 arrays by name, see the module. sizes: what their bits are.
    """

    rows: int
    columns: int
    signed: bool
    occupied: Occupied
    streams: Mapping[str, Array]
    sizes: Sizes

    @property
    def nbytes(self) -> int:
        """Of all streams."""
        return sum(stream.nbytes for stream in self.streams.values())

    def decoded(self, start: int = 0, stop: int | None = None) -> Coded:
        """Codes, widths and steps of rows `[start, stop)`; of packages only those of their groups of 256 are read.

        Raises UserError naming the bit at which packages are damaged; IndexError: rows that are not there.
        """
        from espalier.mechanisms.few_bits.mega import package_cpu

        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise IndexError(f"rows [{start}, {stop}) are not among the {self.rows} of this package")
        begin = start // GROUP * GROUP
        end = min(self.rows, -(-stop // GROUP) * GROUP)
        pairs = self.pairs(begin, max(begin, end))
        codes = np.zeros((len(pairs), self.columns), np.uint8)
        kind = OCCUPIED.index(self.occupied)
        counted = _bits_for(self.columns + 1)
        widths = np.ascontiguousarray(pairs[:, 0])
        index = self.streams["index"].view(np.uint64).reshape(-1, 3)
        damaged_bit = package_cpu.decode(
            (_words(self.streams["packages"]), _words(self.streams["occupied"]), index),
            widths,
            (self.rows, self.columns, int(self.signed), kind, counted, _bits_for(self.columns), begin),
            codes,
        )
        if damaged_bit >= 0:
            raise UserError(
                f"The package at bit {damaged_bit} is damaged.", why="its mode or width is not that of its rows"
            )
        chosen = slice(start - begin, stop - begin)
        whole = torch.from_numpy(codes[chosen])
        widths_and_steps = torch.from_numpy(widths[chosen]), torch.from_numpy(np.ascontiguousarray(pairs[chosen, 1]))
        return Coded(whole.view(torch.int8) if self.signed else whole, *widths_and_steps)

    def values(self) -> torch.Tensor:
        """float32 [rows, columns]: codes times steps."""
        coded = self.decoded()
        return coded.codes * STEPS[coded.steps.long()][:, None]

    def pairs(self, start: int = 0, stop: int | None = None) -> Array:
        """uint8 [rows, 2]: width and step code of each of the rows `[start, stop)`."""
        from espalier.mechanisms.few_bits.mega import package_cpu

        pairs = self.streams["pairs"].reshape(-1, 2)
        out = np.zeros(((self.rows if stop is None else stop) - start, 2), np.uint8)
        bad = package_cpu.pairs_of(_words(self.streams["rows"]), _bits_for(len(pairs)), start, pairs, out)
        if bad >= 0:
            raise UserError(f"Row {bad} names a pair beyond the {len(pairs)} that are there.", do="pack it anew")
        return out


def _words(stream: Array) -> Array:
    """uint64, filled up, and one word more, so that two words can be read wherever a value begins."""
    padded = np.zeros(8 * (-(-len(stream) // 8) + 1), np.uint8)
    padded[: len(stream)] = stream
    return padded.view(np.uint64)


def _bits_for(values: int) -> int:
    """Bits that tell so many values apart."""
    return max(1, (max(values, 1) - 1).bit_length())


def _write_bits(values: Array, bits: int) -> Array:
    """`values` of `bits` bits each, the lowest first, as bytes."""
    spread = (values.astype(np.uint32)[:, None] >> np.arange(bits, dtype=np.uint32)) & 1
    return np.packbits(spread.astype(np.uint8).reshape(-1), bitorder="little")


def encode(coded: Coded, packages: Any = optimal, occupied: Occupied | None = None) -> PackedRows:
    """`coded` in packages.

    Args:
        coded: codes int8 or uint8 [rows, columns] that fit the widths 0 to 8 of their rows; rows of width 0 are 0.
        packages: how a run of codes is cut, as `optimal` says it.
        occupied: None: whatever takes the least.
    Raises UserError: a code that its width cannot hold.
    """
    codes = coded.codes.numpy()
    widths = coded.widths.numpy().astype(np.int64)
    signed = codes.dtype == np.int8
    _refuse(codes, widths, signed)
    if occupied is None:
        candidates = [encode(coded, packages, form) for form in OCCUPIED]
        return min(candidates, key=lambda packed: packed.nbytes)
    rows, columns = codes.shape
    steps_of = coded.steps.numpy()
    pair_widths = widths
    order = stored_order(widths)
    codes = codes[order]
    widths = widths[order]
    stored = (widths > 0)[:, None] & ((codes != 0) if occupied != "dense" else np.ones_like(codes, bool))
    counts = stored.sum(1).astype(np.int64)
    values = codes[stored].view(np.uint8).astype(np.uint64)
    layout = _laid_out(widths, counts, packages)
    streams = {"packages": _packages(layout, np.repeat(widths, counts), values)}
    streams["occupied"], bitmap = _told(stored, counts, occupied)
    streams["index"] = _index(layout, counts)
    pairs, at = np.unique(np.stack([pair_widths, steps_of], 1).astype(np.uint8), axis=0, return_inverse=True)
    streams["rows"] = _write_bits(at.reshape(-1), _bits_for(len(pairs)))
    streams["pairs"] = pairs.reshape(-1)
    bits = {name: 8 * stream.nbytes for name, stream in streams.items()}
    payload = int(np.repeat(widths, counts).sum())
    headers = HEADER * len(layout.widths)
    steps = 16 * len(pairs) + rows * _bits_for(len(pairs))
    padding = bits["packages"] - payload - headers + bits["occupied"] - bitmap + bits["rows"] + bits["pairs"] - steps
    sizes = Sizes(payload, headers, padding, bitmap, bits["index"], steps)
    return PackedRows(rows, columns, bool(signed), occupied, streams, sizes)


def stored_order(widths: Array) -> Array:
    """int64 [rows]: which row is stored at each place."""
    block = np.arange(len(widths)) // GROUP
    return np.lexsort((np.where(block % 2, -widths, widths), block))


def _refuse(codes: Array, widths: Array, signed: bool) -> None:
    if len(widths) and (widths.min() < 0 or widths.max() > 8):
        at = int(np.flatnonzero((widths < 0) | (widths > 8))[0])
        raise UserError(f"Row {at} has {int(widths[at])} bits.", do="give it 0 to 8")
    shift = widths[:, None]
    low, high = (-(1 << shift >> 1), (1 << shift >> 1)) if signed else (0 * shift, 1 << shift)
    bad = np.flatnonzero(((codes < low) | (codes >= np.maximum(high, 1))).any(1))
    if len(bad):
        raise UserError(f"Row {int(bad[0])} holds codes that {int(widths[bad[0]])} bits cannot hold.")


class Layout(NamedTuple):
    """Packages: their width and words, the words before them; of each value its package and place in it."""

    widths: Array
    words: Array
    before: Array
    package: Array
    place: Array


def _laid_out(widths: Array, counts: Array, packages: Any) -> Layout:
    """One run for consecutive rows of one width; rows without codes end none."""
    some = np.flatnonzero(counts)
    starts = np.flatnonzero(np.diff(widths[some], prepend=-1))
    totals = np.add.reduceat(counts[some], starts)
    of_run = widths[some][starts]
    cut = list(map(cache(packages), totals.tolist(), of_run.tolist()))
    lengths = np.array([len(run) for run in cut], np.int64)
    words = np.array([word for run in cut for word in run], np.int64)
    each = np.repeat(of_run, lengths)
    begins = offsets_of(capacity(words, np.maximum(each, 1)))  # places before each package
    base = begins[offsets_of(lengths)[:-1]]  # of the first package of each run
    within = np.arange(int(totals.sum())) - np.repeat(offsets_of(totals)[:-1], totals)
    spot = np.repeat(base, totals) + within
    package = np.searchsorted(begins[1:], spot, side="right")
    return Layout(each, words, offsets_of(words), package, spot - begins[package])


def _packages(layout: Layout, width_of: Array, values: Array) -> Array:
    bits = np.zeros(64 * int(layout.before[-1]), np.uint8)
    starts = 64 * layout.before[:-1]
    header = (layout.words - 1) | ((layout.widths - 1) << 2)
    for bit in range(HEADER):
        bits[starts + bit] = (header >> bit) & 1
    at = starts[layout.package] + HEADER + layout.place * width_of if len(values) else np.zeros(0, np.int64)
    for bit in range(8):
        some = width_of > bit
        bits[at[some] + bit] = (values[some] >> np.uint64(bit)) & np.uint64(1)
    return np.packbits(bits, bitorder="little")


def _told(stored: Array, counts: Array, occupied: Occupied) -> tuple[Array, int]:
    """Which columns are stored, and the bits that say so."""
    if occupied == "dense":
        return np.zeros(0, np.uint8), 0
    if occupied == "bitmap":
        return np.packbits(stored, axis=1, bitorder="little").reshape(-1), stored.size
    of_count = _bits_for(stored.shape[1] + 1)
    of_column = _bits_for(stored.shape[1])
    columns = np.nonzero(stored)[1]
    streams = [_write_bits(counts, of_count), _write_bits(columns, of_column)]
    return np.concatenate(streams), len(counts) * of_count + len(columns) * of_column


def _index(layout: Layout, counts: Array) -> Array:
    """For every 256 rows, and at the end: words before the package of their first code, its place there, and codes
    before it; uint64."""
    sums = offsets_of(counts)
    before = np.append(sums[: len(counts) : GROUP], sums[-1])
    inside = before < len(layout.package)
    package = layout.package[before[inside]]
    index = np.zeros((len(before), 3), np.uint64)
    index[inside, 0] = layout.before[package]
    index[inside, 1] = layout.place[before[inside]]
    index[:, 2] = before
    return index.reshape(-1).view(np.uint8)
