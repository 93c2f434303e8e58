"""Adaptive-Package: what is unpacked is what was packed, sizes add up to the file, nothing damaged is read."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.mechanisms.few_bits.a2q import Coded
from espalier.mechanisms.few_bits.mega import package, package_file
from espalier.mechanisms.few_bits.mega.package import PackedRows, capacity, encode, optimal
from espalier.recipe.errors import UserError


def greedy(codes: int, width: int) -> list[int]:
    """Words of the packages of a run: the longest while more is left than one holds, then the shortest that does."""
    most = capacity(3, width)
    whole, rest = divmod(codes, most)
    return [3] * whole + [next(words for words in (1, 2, 3) if capacity(words, width) >= rest)] * bool(rest)


def coded(widths: list[int], columns: int, signed: bool, share: float, seed: int) -> Coded:
    random = np.random.default_rng(seed)
    width = np.array(widths, np.int64)[:, None]
    codes = random.integers(0, 256, (len(widths), columns)) & ((1 << width) - 1)
    codes = np.where(random.random(codes.shape) < share, codes, 0)
    if signed:
        half = 1 << width >> 1
        codes = ((codes ^ half) - half) * (width > 0)
        codes = np.where(random.random(codes.shape) < share, codes, 0)
    steps = torch.from_numpy(random.integers(0, 256, len(widths)).astype(np.uint8))
    kind = torch.int8 if signed else torch.uint8
    return Coded(torch.from_numpy(codes).to(kind), torch.tensor(widths, dtype=torch.uint8), steps)


def same(one: Coded, other: Coded) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 8), max_size=80),
    st.integers(1, 70) | st.sampled_from([8, 511, 2048]),
    st.booleans(),
    st.sampled_from([0.0, 0.03, 0.5, 1.0]),
    st.sampled_from(["bitmap", "index", "dense", None]),
    st.sampled_from([greedy, optimal]),
    st.integers(0, 999),
)
def test_decoding_gives_back_every_code(widths, columns, signed, share, occupied, packages, seed):
    given_ = coded(widths, columns, signed, share, seed)
    packed = encode(given_, packages, occupied)
    assert same(packed.decoded(), given_)
    assert 8 * packed.nbytes == packed.sizes.total
    data = package_file.to_bytes({"x": packed}, {"step": 3})
    assert package_file.file_sizes(data).total == 8 * len(data)
    back, facts = package_file.from_bytes(data)
    assert facts == {"step": 3}
    assert same(back["x"].decoded(), given_)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 900), st.integers(0, 99), st.data())
def test_some_rows_are_decoded_as_among_all(rows, seed, data):
    widths = np.random.default_rng(seed).integers(0, 9, rows).tolist()
    given_ = coded(widths, 11, False, 0.5, seed)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    for occupied in ("bitmap", "index", "dense"):
        part = encode(given_, optimal, occupied).decoded(start, stop)
        assert same(part, Coded(*(one[start:stop] for one in given_)))


@pytest.mark.parametrize(("start", "stop"), [(-5, 3), (0, 11), (7, 3), (11, None)])
def test_rows_that_are_not_there_are_named(start, stop):
    packed = encode(coded([2] * 10, 4, False, 1.0, 0))
    with pytest.raises(IndexError, match=rf"rows \[{start}, {stop or 10}\) are not among the 10"):
        packed.decoded(start, stop)
    assert len(packed.decoded(10).codes) == 0


@functools.cache
def least(codes: int, width: int) -> int:
    if codes <= 0:
        return 0
    return min(words + least(codes - capacity(words, width), width) for words in (1, 2, 3))


@pytest.mark.parametrize("width", range(1, 9))
def test_no_cut_into_packages_takes_less_than_the_optimal_one(width):
    differs = False
    for codes in range(1, 4 * capacity(3, width)):
        for cut in (greedy, optimal):
            assert sum(capacity(words, width) for words in cut(codes, width)) >= codes
        assert sum(optimal(codes, width)) == least(codes, width)
        assert sum(optimal(codes, width)) <= sum(greedy(codes, width)) <= 3 * -(-codes // capacity(3, width))
        differs |= sum(optimal(codes, width)) < sum(greedy(codes, width))
    assert differs or width != 3, "two middle ones may take less than a long and a short one"


def longest_only(codes: int, width: int) -> list[int]:
    """Packages of 192 bits alone."""
    return [3] * -(-codes // capacity(3, width))


def counted(given_: Coded, packages, occupied: str) -> dict[str, int]:
    """Bits of the matrix by what they are for, from its codes one by one: runs of rows of one width, each cut into
    packages of which every one is filled before the next."""
    order = package.stored_order(given_.widths.numpy().astype(np.int64))
    found = dict.fromkeys(("payload", "header", "padding", "bitmap"), 0)
    runs: list[list[int]] = []
    for row in order.tolist():
        width = int(given_.widths[row])
        stored = given_.codes.shape[1] if occupied == "dense" else int((given_.codes[row] != 0).sum())
        if width and stored:
            if runs and runs[-1][0] == width:
                runs[-1][1] += stored
            else:
                runs.append([width, stored])
    for width, codes in runs:
        left = codes
        for words in packages(codes, width):
            inside = min(left, (64 * words - 5) // width)
            left -= inside
            found["payload"] += inside * width
            found["header"] += 5
            found["padding"] += 64 * words - 5 - inside * width
        assert left == 0
    found["bitmap"] = given_.codes.numel() if occupied == "bitmap" else 0
    return found


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 8), max_size=120),
    st.integers(1, 70),
    st.sampled_from([0.03, 0.5, 1.0]),
    st.sampled_from(["bitmap", "dense"]),
    st.integers(0, 99),
)
def test_optimal_is_at_most_greedy_at_most_192_bits_and_parts_counted_one_by_one_are_the_file(
    widths, columns, share, occupied, seed
):
    given_, totals = coded(widths, columns, False, share, seed), []
    for cut in (optimal, greedy, longest_only):
        packed = encode(given_, cut, occupied)
        assert same(packed.decoded(), given_)
        found, sizes = counted(given_, cut, occupied), packed.sizes
        assert (sizes.payload, sizes.header, sizes.bitmap) == (found["payload"], found["header"], found["bitmap"])
        totals.append(8 * packed.streams["packages"].nbytes)
        assert totals[-1] == found["payload"] + found["header"] + found["padding"]
        entries = -(-len(widths) // package.GROUP) + 1
        assert sizes.index == 64 * 3 * entries
        distinct = len({(int(a), int(b)) for a, b in zip(given_.widths, given_.steps, strict=True)})
        each = max(1, (max(distinct, 1) - 1).bit_length())
        assert sizes.steps == 16 * distinct + each * len(widths)
        filled = -found["bitmap"] % 8 if columns % 8 == 0 else len(widths) * (-columns % 8) * (occupied == "bitmap")
        assert sizes.padding == found["padding"] + filled + -each * len(widths) % 8
        data = package_file.to_bytes({"x": packed})
        start = 20 + int.from_bytes(data[8:12], "little")
        streams = [one.nbytes for one in packed.streams.values()]
        assert len(data) == start + sum(-(-one // 8) * 8 for one in streams)
        assert 8 * sum(streams) == sum(found.values()) + sizes.index + sizes.steps + filled + -each * len(widths) % 8
    assert totals == sorted(totals)


def test_bytes_of_a_small_matrix_are_those_written_by_hand():
    """Two rows of 2 bits, codes 1 2 0 3 and 0 0 1 0: one package of 64 bits, mode 0, width 2 (1 << 2)."""
    given_ = Coded(
        torch.tensor([[1, 2, 0, 3], [0, 0, 1, 0]], dtype=torch.uint8),
        torch.tensor([2, 2], dtype=torch.uint8),
        torch.tensor([128, 128], dtype=torch.uint8),
    )
    packed = encode(given_, optimal, "bitmap")
    word = 0b00 | (0b001 << 2) | (1 << 5) | (2 << 7) | (3 << 9) | (1 << 11)
    assert packed.streams["packages"].tobytes() == word.to_bytes(8, "little")
    assert packed.streams["occupied"].tolist() == [0b1011, 0b0100]
    assert (packed.sizes.payload, packed.sizes.header) == (8, 5)


def test_lists_of_columns_are_smaller_where_few_are_left():
    sparse = coded([1] * 50, 1433, False, 0.02, 1)
    sizes = {kind: encode(sparse, optimal, kind).nbytes for kind in ("bitmap", "index", "dense")}
    assert sizes["index"] < 0.5 * sizes["bitmap"]
    assert encode(sparse).occupied == "index"
    assert encode(coded([4] * 50, 64, False, 1.0, 1)).occupied == "dense"


@pytest.fixture(scope="module")
def file() -> bytes:
    return package_file.to_bytes({"x": encode(coded([1, 4, 4, 8, 0, 3], 9, True, 0.6, 2))})


def test_every_truncation_is_refused_with_its_offset(file):
    for length in range(len(file)):
        with pytest.raises(UserError, match=rf"damaged at byte {length:,}") as found:
            package_file.from_bytes(file[:length])
        assert found.value.do
    with pytest.raises(UserError, match=rf"damaged at byte {len(file):,}"):
        package_file.from_bytes(file + b"\0")


def test_whatever_bit_is_changed_is_found(file):
    for at, bit in itertools.product(range(len(file)), range(8)):
        changed = bytearray(file)
        changed[at] ^= 1 << bit
        with pytest.raises(UserError, match=r"damaged at byte \d"):
            package_file.from_bytes(bytes(changed))


def changed_header(file: bytes, field: bytes, instead: bytes) -> bytes:
    """As `file`, with a field of the header changed and the hash of that."""
    end = package_file.FIRST + int.from_bytes(file[8:12], "little")
    header = file[package_file.FIRST : end].rstrip().replace(field, instead)
    header += b" " * (-(package_file.FIRST + len(header)) % 8)
    length = len(header).to_bytes(4, "little")
    return package_file.MAGIC + length + package_file._hash(length, header) + header + file[end:]


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        (b'"signed":true', b'"signed":null'),
        (b'"rows":6', b'"rows":-6'),
        (b'"columns":9', b'"columns":"9"'),
        (b'"occupied":"', b'"occupied":"h'),
        (b'"sizes":[', b'"sizes":[1,'),
        (b'"facts"', b'"fact"'),
    ],
)
def test_a_header_that_says_what_cannot_be_is_refused(file, field, instead):
    assert field in file
    with pytest.raises(UserError, match="damaged at byte 20: its header cannot be read"):
        package_file.from_bytes(changed_header(file, field, instead))


def test_another_version_is_not_read(file):
    with pytest.raises(UserError, match="damaged at byte 5: its version is not known"):
        package_file.from_bytes(file.replace(b"ESPKG3", b"ESPKG2"))


@pytest.mark.parametrize("word", [0b11, 0b00 | (5 << 2)])
def test_a_package_of_no_mode_or_of_another_width_is_refused_by_its_bit(word):
    packed = encode(coded([4] * 80, 8, False, 1.0, 3), optimal, "dense")
    words = packed.streams["packages"].copy().view(np.uint64)
    words[3] = words[3] & ~np.uint64(31) | np.uint64(word)
    broken = PackedRows(80, 8, False, "dense", {**packed.streams, "packages": words.view(np.uint8)}, packed.sizes)
    with pytest.raises(UserError, match="package at bit 192"):
        broken.decoded()


@pytest.mark.parametrize("row", [3, 299])
def test_a_bitmap_that_names_more_or_fewer_codes_than_there_are_is_refused(row):
    given_ = coded([2, 4, 1] * 100, 16, False, 0.5, 5)
    packed = encode(given_, optimal, "bitmap")
    for changed in (0, 255):
        bitmap = packed.streams["occupied"].copy()
        assert bitmap[2 * row] != changed
        bitmap[2 * row] = changed
        broken = PackedRows(300, 16, False, "bitmap", {**packed.streams, "occupied": bitmap}, packed.sizes)
        with pytest.raises(UserError, match="package at bit"):
            broken.decoded()


def test_widths_that_alternate_close_few_packages():
    alternating, level = (
        encode(coded(widths, 16, False, 1.0, 1), optimal, "dense") for widths in ([1, 2] * 512, [2] * 512)
    )
    codes = 512 * 16 * 3
    assert 8 * alternating.streams["packages"].nbytes < 1.12 * codes
    assert alternating.sizes.index == 8 * 24 * 5
    assert level.sizes.index == 8 * 24 * 3


def test_codes_beyond_their_width_are_refused():
    one = torch.tensor([[4]], dtype=torch.uint8)
    with pytest.raises(UserError, match="2 bits cannot hold"):
        encode(Coded(one, torch.tensor([2], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)))
    with pytest.raises(UserError, match="9 bits"):
        encode(Coded(one, torch.tensor([9], dtype=torch.uint8), torch.tensor([0], dtype=torch.uint8)))
