"""Batched packing: every batch reads back bitwise, each row is read once, a killed run ends with the same bytes."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.graph.conftest import made
from tests.mechanisms.disk_batches.conftest import on_disk, plain, read_whole, request

from espalier.graph.sampling.neighbor_sampler import Sampler, Style
from espalier.kernels import row_bits
from espalier.mechanisms.disk_batches import manifest, pack
from espalier.mechanisms.disk_batches.batch_pool import Draws
from espalier.mechanisms.disk_batches.features import FeatureTable
from espalier.mechanisms.disk_batches.row_format import RowFormat
from espalier.recipe.errors import UserError
from espalier.store.cost import pages
from espalier.store.direct_io import DiskFull
from espalier.store.extents import DamagedExtent

WIDTHS = {4: 1, 100: 25, 512: 128, 5732: 1433, 1536: 384, 4096: 1024, 8200: 2050}
"""Row size in bytes to values of float32: divisors and multiples of a page, and neither."""


def same_rows(packed, wanted, hot=None) -> None:
    """Each batch's features are those of its nodes, bit for bit."""
    for at in range(len(packed)):
        assert torch.equal(read_whole(packed, at, hot), plain(wanted.features, packed.pool.nodes(at)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row_bytes", WIDTHS)
@pytest.mark.parametrize("shared", [False, True])
def test_batches_read_back_bitwise_for_any_row_size(tmp_path, row_bytes, shared):
    wanted = request(tmp_path / "set", width=WIDTHS[row_bytes], buffer=300 * row_bytes)
    if shared:  # so little disk that all batches are one segment
        wanted = request(tmp_path / "set", width=WIDTHS[row_bytes], buffer=300 * row_bytes, disk=400 * row_bytes)
    packed = pack.pack(wanted)
    assert packed.about.ranges > 1
    assert (packed.about.length > 1) == shared
    same_rows(packed, wanted)


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_seeds_read_back_bitwise(tmp_path_factory, data):
    """Isolated seeds, duplicate seeds, empty batches, a short last one; no row in memory, or all of them."""
    folder = tmp_path_factory.mktemp("set")
    nodes = data.draw(st.integers(1, 50))
    graph = made(nodes, data.draw(st.integers(0, 60)), seed=3)
    ids = st.lists(st.integers(0, nodes - 1), max_size=8)
    seeds = [np.array(data.draw(ids), np.int64) for _ in range(data.draw(st.integers(1, 4)))]
    rows = np.random.default_rng(0).normal(size=(nodes, 3)).astype(np.float32)
    wanted = request(
        folder / "set",
        values=rows,
        sampler=Sampler(graph, Style(data.draw(st.booleans()), "symmetric")),
        graph=manifest.graph_hash(graph),
        seeds=seeds,
        memory=data.draw(st.sampled_from((0, 24, 12 * nodes))),
        disk=data.draw(st.sampled_from((None, 12 * nodes))),
        buffer=data.draw(st.sampled_from((1, 500, 1 << 20))),
    )
    packed = pack.pack(wanted)
    same_rows(packed, wanted)
    for at, ids in enumerate(seeds):
        split = packed.split(at)
        assert len(split.hot_at) + len(split.shared_at) + len(split.cold_at) == len(packed.pool.nodes(at))
        assert packed.pool[at].seeds.tolist() == ids.tolist()


class Counted(FeatureTable):
    """Features that note which rows are read."""

    def __init__(self, features: FeatureTable) -> None:
        super().__init__(features.table)
        self.reads = np.zeros(len(features), np.int64)

    def consecutive(self, start, stop) -> torch.Tensor:
        self.reads[start:stop] += 1
        return super().consecutive(start, stop)


def test_each_row_is_read_once(tmp_path):
    wanted = request(tmp_path / "set", nodes=300, buffer=9000, table=True)
    counted = Counted(wanted.features)
    pack.pack(pack.PackRequest(**{**vars(wanted), "features": counted}))
    assert counted.reads.tolist() == [1] * 300


def test_a_range_that_no_batch_uses_is_not_read(tmp_path):
    rows = np.zeros((400, 4), np.float32)
    wanted = request(
        tmp_path / "set", values=rows, fanouts=(0,), seeds=[np.array([3, 5])], buffer=4 * 16 * 100, table=True
    )
    counted = Counted(wanted.features)
    pack.pack(pack.PackRequest(**{**vars(wanted), "features": counted}))
    assert counted.reads.tolist() == [1] * 100 + [0] * 300


@pytest.mark.parametrize(("kind", "share"), [("bf16", 2.0**-8), ("int8", 1 / 253), ("int4", 1 / 13.9)])
def test_the_stated_error_bounds_the_rows(tmp_path, kind, share):
    wanted = request(tmp_path / "set", rows=kind, buffer=9000)
    packed = pack.pack(wanted)
    most, total, square = 0.0, 0.0, 0.0
    for at in range(len(packed)):
        rows = plain(wanted.features, packed.pool.nodes(at))
        wrong = (read_whole(packed, at) - rows).abs()
        scale = rows.abs() if kind == "bf16" else rows.abs().amax(1, keepdim=True)
        assert (wrong <= share * scale).all()
        most = max(most, float(wrong.max()))
        total, square = total + float(rows.square().sum()), square + float(wrong.square().sum())
    largest, relative = packed.about.error
    assert 0 < most <= largest
    assert relative == pytest.approx((square / total) ** 0.5, rel=0.2)


@pytest.mark.parametrize("width", [1, 6, 7])
def test_rows_of_int4_are_codes_of_row_bits_times_a_scale(width):
    row, rows = RowFormat("int4", width, torch.float32), torch.randn(50, width)
    data = row.encode(rows)
    packed = data[:, 4 : 4 + -(-width // 2)].contiguous().view(-1)
    codes = row_bits.unpack_rows(packed, row_bits.widths_of(50, 4), width, signed=True)
    assert codes.abs().amax(1).tolist() == [7] * 50
    assert torch.equal(row.decode(data), codes * data[:, :4].view(torch.float32))


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint8"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_small_dtypes_stay_as_they_are(tmp_path, dtype, kind):
    rows = (np.random.default_rng(2).normal(size=(400, 6)) * 5).astype(dtype)
    wanted = request(tmp_path / "set", values=rows, rows=kind)
    packed = pack.pack(wanted)
    size = np.dtype(dtype).itemsize
    assert packed.row.stored.itemsize == min(size, {"fp32": 4, "bf16": 2, "int8": 1, "int4": 1}[kind])
    if size <= packed.row.stored.itemsize or kind == "fp32":
        same_rows(packed, wanted)


# --- killed, interrupted, refused ------------------------------------------------------------------------------------


def hashes(folder: Path) -> dict[str, str]:
    """Of every file of a set but the lock."""
    found = {one.name: one for one in sorted(folder.iterdir()) if one.name != manifest.LOCK}
    return {name: hashlib.sha256(one.read_bytes()).hexdigest() for name, one in found.items()}


class Stop(Exception):
    """Ends packing at a chosen call."""


@given(st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_packing_broken_off_anywhere_ends_with_the_same_bytes(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("sets")
    whole = request(folder / "whole", disk=400 * 96, buffer=9000)
    pack.pack(whole)
    broken = request(folder / "broken", disk=400 * 96, buffer=9000)
    for last in (first, second):
        calls = iter(range(last))

        def progress(done: int, total: int, calls=calls) -> None:
            if next(calls, None) is None:
                raise Stop

        try:
            pack.pack(broken, progress)
        except Stop:
            continue
    packed = pack.pack(broken)
    assert hashes(folder / "whole") == hashes(folder / "broken")
    same_rows(packed, broken)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import tests.mechanisms.disk_batches.conftest as sets
from espalier.mechanisms.disk_batches import pack

def progress(done, total):
    print(done, flush=True)

wanted = sets.request(Path(sys.argv[1]), disk=400 * 96, buffer=9000)
print("ready", flush=True)
sys.stdin.readline()
pack.pack(wanted, progress)
"""


@pytest.mark.slow
def test_packing_killed_at_any_time_ends_with_the_same_bytes(tmp_path):
    pack.pack(request(tmp_path / "whole" / "set", disk=400 * 96, buffer=9000))
    root = str(Path(__file__).parents[3])
    for lines in (1, 3, 6, 9, 14, 20):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "killed" / "set"), root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        for _ in range(lines):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    pack.pack(request(tmp_path / "killed" / "set", disk=400 * 96, buffer=9000))
    assert hashes(tmp_path / "whole" / "set") == hashes(tmp_path / "killed" / "set")


def test_sampling_and_packing_tell_how_far_they_are(tmp_path):
    told = []
    asked = request(tmp_path / "set", buffer=40_000)
    pack.pack(asked, lambda done, total: told.append((done, total))).close()
    batches, nodes = len(asked.draws.seeds), len(asked.features)
    assert [done for done, total in told if total == batches] == list(range(batches))
    ranges = [done for done, total in told if total == nodes]
    assert ranges == sorted(set(ranges)) != []
    assert len(ranges) > 3
    assert max(ranges) < nodes


def test_a_packed_set_is_not_packed_again(tmp_path):
    wanted = request(tmp_path / "set")
    pack.pack(wanted)
    files = [one for one in (tmp_path / "set").iterdir() if one.name != manifest.LOCK]
    before = [one.stat().st_mtime_ns for one in files]
    pack.pack(wanted, lambda done, total: pytest.fail("packed again"))
    assert [one.stat().st_mtime_ns for one in files] == before


CHANGES = {
    "the edges of the graph": lambda path: request(path, edges=1700, seeds=[np.arange(32)]),
    "features.npy": lambda path: request(path, values=np.ones((400, 24), np.float32), seeds=[np.arange(32)]),
    "the training nodes": lambda path: request(path, seeds=[np.arange(33)]),
    r"fan-outs \(\[4, 3\] then, \[4, 4\] now\)": lambda path: request(path, fanouts=(4, 4), seeds=[np.arange(32)]),
    "kind of layer": lambda path: request(path, style=Style(True, "symmetric"), seeds=[np.arange(32)]),
    r"store.rows\) \(fp32 then, int8 now\)": lambda path: request(path, rows="int8", seeds=[np.arange(32)]),
    r"store.disk\) \(no limit then": lambda path: request(path, disk=1 << 20, seeds=[np.arange(32)]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("begun", [False, True])
def test_a_stale_set_is_refused_by_the_name_of_what_changed(tmp_path, change, begun):
    first = request(tmp_path / "set", seeds=[np.arange(32)])
    if begun:
        with pytest.raises(Stop):
            pack.pack(first, lambda done, total: (_ for _ in ()).throw(Stop()))
    else:
        pack.pack(first)
    with pytest.raises(UserError, match=change):
        pack.pack(CHANGES[change](tmp_path / "set"))


def test_other_rows_in_memory_are_noticed(tmp_path):
    rows = np.zeros((400, 2), np.float32)
    pack.pack(request(tmp_path / "set", table=True, values=rows))
    with pytest.raises(UserError, match=r"the features \(rows\)"):
        pack.pack(request(tmp_path / "set", table=True, values=rows + 1))


def test_two_runs_do_not_pack_into_one_folder(tmp_path):
    with (
        manifest.locked([tmp_path / "set"]),
        pytest.raises(UserError, match=rf"Another run is packing into .*set: process {os.getpid()}"),
    ):
        pack.pack(request(tmp_path / "set"))
    pack.pack(request(tmp_path / "set"))


def test_a_folder_that_nobody_may_write_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"store.path = .* cannot be written"):
        pack.pack(request(tmp_path / "file" / "set", table=True, values=np.zeros((400, 2), np.float32)))


def test_a_pool_of_unknown_inputs_is_drawn_anew(tmp_path):
    pack.pack(request(tmp_path / "set", seed=5)).close()
    (tmp_path / "set" / manifest.FILE).unlink()
    wanted = request(tmp_path / "set", seed=6)
    same_rows(pack.pack(wanted), wanted)


def test_a_set_that_is_not_whole_is_not_opened(tmp_path):
    with pytest.raises(UserError, match="no packed set that is whole"):
        pack.PackedSet([tmp_path])
    with pytest.raises(Stop):
        pack.pack(request(tmp_path / "set"), lambda done, total: (_ for _ in ()).throw(Stop()))
    with pytest.raises(UserError, match="pack again"):
        pack.PackedSet([tmp_path / "set"])


def test_values_that_are_not_finite_are_refused_by_row(tmp_path):
    rows = np.zeros((400, 4), np.float32)
    rows[217, 3] = np.nan
    with pytest.raises(UserError, match="first in row 217"):
        pack.pack(request(tmp_path / "set", values=rows, buffer=3000))


def test_a_disk_budget_that_is_too_small_names_the_least(tmp_path):
    with pytest.raises(UserError, match=r"(?s)holds 10 feature rows.*store.disk of at least [\d,]+ bytes"):
        pack.pack(request(tmp_path / "set", disk=960))


def test_a_damaged_extent_is_found_and_packed_again(tmp_path):
    wanted = request(tmp_path / "set", disk=400 * 96, buffer=9000)
    packed = pack.pack(wanted)
    before = hashes(tmp_path / "set")
    for extent in packed.rows:
        if not packed.rows.bytes(extent):
            continue
        with (tmp_path / "set" / pack.ROWS).open("r+b") as file:
            file.seek(packed.rows.offset(extent) + packed.rows.bytes(extent) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))
        with pytest.raises(DamagedExtent, match=extent):
            packed.rows.read(extent)
        pack.repack(packed, extent, wanted.features)
    assert hashes(tmp_path / "set") == before
    same_rows(packed, wanted)


def test_other_features_do_not_mend_a_damaged_extent(tmp_path):
    packed = pack.pack(request(tmp_path / "set"))
    other = on_disk(np.ones((400, 24), np.float32), tmp_path / "other")
    with pytest.raises(DamagedExtent, match="cold/0"):
        pack.repack(packed, "cold/0", other)


def test_a_set_may_lie_on_several_disks(tmp_path):
    values = np.random.default_rng(0).normal(size=(400, 2048)).astype(np.float32)
    folders = tuple(tmp_path / f"disk{number}" for number in range(3))
    wanted = request(tmp_path / "disk0", values=values, folders=folders, buffer=1 << 20)
    packed = pack.pack(wanted)
    same_rows(packed, wanted)
    sizes = [(folder / pack.ROWS).stat().st_size for folder in folders]
    assert min(sizes) > 0.7 * max(sizes)


def test_memory_may_depend_on_the_sampled_pool(tmp_path):
    def memory(pool) -> int:
        return 96 * max(len(pool.nodes(at)) for at in range(len(pool)))

    wanted = request(tmp_path / "set", memory=memory)
    packed = pack.pack(wanted)
    assert packed.hot_rows == max(len(packed.pool.nodes(at)) for at in range(len(packed)))
    same_rows(packed, wanted)


def test_rows_in_memory_may_be_those_of_another_set(tmp_path):
    base = pack.pack(request(tmp_path / "base"))
    hot = base.plan.read("hot").numpy()
    wanted = request(tmp_path / "base" / "later", seeds=[np.arange(40, 60)], memory=hot)
    pack.pack(wanted).close()
    later = pack.PackedSet([tmp_path / "base" / "later"])
    assert later.rows.bytes("hot") == 0
    assert later.hot_rows == base.hot_rows
    assert len(later.split(0).hot_at)
    same_rows(later, wanted, base.load_hot())
    with pytest.raises(UserError, match="the rows that another set keeps in memory"):
        pack.pack(request(tmp_path / "base" / "later", seeds=[np.arange(40, 60)], memory=hot[:-1]))


def test_rows_in_memory_are_loaded_in_pieces_and_checked(tmp_path, monkeypatch):
    wanted = request(tmp_path / "set")
    packed = pack.pack(wanted)
    whole = packed.load_hot()
    assert torch.equal(packed.row.decode(whole), plain(wanted.features, packed.plan.read("hot").numpy()))
    monkeypatch.setattr(pack, "LOADED", 700)
    assert torch.equal(packed.load_hot(), whole)
    with (tmp_path / "set" / pack.ROWS).open("r+b") as file:
        file.write(b"?")
    with pytest.raises(DamagedExtent, match="'hot'"):
        packed.load_hot()


def test_draws_may_share_a_step(tmp_path):
    seeds = [np.arange(10), np.arange(10), np.arange(10, 20)]
    wanted = request(tmp_path / "set", seeds=seeds)
    wanted = pack.PackRequest(**{**vars(wanted), "draws": Draws(seeds, (4, 4, 7), (2, 2), 3)})
    packed = pack.pack(wanted)
    for at, (ids, step) in enumerate(zip(seeds, (4, 4, 7), strict=True)):
        drawn = wanted.sampler.draw(ids, (2, 2), 3, step)
        assert np.array_equal(packed.pool.nodes(at), drawn.nodes)


def test_a_full_disk_says_how_much_is_missing_and_packing_goes_on(tmp_path):
    pack.pack(request(tmp_path / "whole" / "set", buffer=9000))
    wanted = request(tmp_path / "full" / "set", buffer=9000)
    size = (tmp_path / "whole" / "set" / pack.ROWS).stat().st_size
    for room in (size // 100, size // 2, size - 4096):  # of the pool, of its index, of the rows
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
        try:
            with pytest.raises(DiskFull, match=r"[\d,]+ bytes more"):
                pack.pack(wanted)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    same_rows(pack.pack(wanted), wanted)
    assert hashes(tmp_path / "whole" / "set") == hashes(tmp_path / "full" / "set")


def test_a_disk_that_is_full_before_anything_is_packed_is_the_users(tmp_path):
    wanted = request(tmp_path / "set", buffer=9000)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(DiskFull, match=r"(?s)could not write .*set\..*File too large.*another store\.path"):
            pack.pack(wanted)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    same_rows(pack.pack(wanted), wanted)


def transferred() -> tuple[int, int]:
    """Bytes that this process has read from disks and written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def touched(bounds: np.ndarray) -> int:
    """Bytes of the pages that hold [bounds[:, at], bounds[:, at + 1]), each piece by itself."""
    first, last = bounds[:, :-1], bounds[:, 1:]
    return int(((last + 4095) // 4096 - first // 4096)[last > first].sum()) * 4096


@pytest.mark.parametrize("disk", [None, 20_000 * 512])
def test_what_is_read_and_written_is_what_the_plan_says(tmp_path, monkeypatch, disk):
    wanted = request(tmp_path / "set", nodes=20_000, edges=80_000, width=128, batch=512, buffer=8 << 20, disk=disk)
    if not wanted.features._files[0].direct:
        pytest.skip("the file system of the test has no direct I/O")
    measured = []

    def counted(*arguments, run=pack._pack_rows) -> None:
        before = transferred()
        run(*arguments)
        measured.extend(after - start for after, start in zip(transferred(), before, strict=True))

    monkeypatch.setattr(pack, "_pack_rows", counted)
    packed = pack.pack(wanted)
    size = (tmp_path / "set" / pack.ROWS).stat().st_size
    assert size == sum(pages(packed.rows.bytes(name)) for name in packed.rows)
    bounds = packed.plan.read("bounds").numpy()
    lists, pieces = touched(bounds[1:] * 8), touched(bounds * 512)  # ids are read, and rows written, range by range
    plan = packed.plan.bytes("hot") + packed.plan.bytes("bounds")
    read, written = measured
    assert read == pytest.approx(20_000 * 512 + lists + plan, rel=0.02)
    assert written == pytest.approx(pieces, rel=0.02)
    assert pieces < size + 4096 * bounds.size  # a page is written again for each piece that begins within it
