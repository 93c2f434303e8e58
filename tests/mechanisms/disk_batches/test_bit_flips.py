"""A flipped bit anywhere in a packed set is named with its file and what to do, or packed again, before it is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.mechanisms.disk_batches.packing import graph_of, packed, request_of

from espalier.mechanisms.disk_batches import manifest
from espalier.mechanisms.disk_batches.pack import HOT_ROWS, PackedSet, repack
from espalier.mechanisms.disk_batches.reader import ReaderOptions, TieredFeatures
from espalier.recipe.errors import UserError


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    graph, folder = graph_of(nodes=600, width=100, edges=3000), tmp_path_factory.mktemp("flips") / "set"
    packed(graph, folder, batch=64, memory=40 * 400, disk=int(1.2 * graph.features.nbytes)).close()
    return graph, folder


def flipped(folder, where, name, places):
    """A copy of the set with a bit of each of `places` flipped."""
    shutil.copytree(folder, where)
    data = bytearray((where / name).read_bytes())
    for place in places:
        data[place] ^= 1 << place % 8
    (where / name).write_bytes(data)
    return where


def used(folder, request, repair=False):
    """Opens the set as a run does, and reads all of it."""
    found = manifest.read(folder)
    found.refuse_other(request.inputs(), folder)
    made = PackedSet([folder])
    fix = (lambda name, _: repack(made, name, request.features)) if repair else None
    with TieredFeatures(made, ReaderOptions(), fix) as features:
        rows = [features.read(batch) for batch in range(len(made))]
        nodes = [(made.pool[batch], made.pool.nodes(batch)) for batch in range(len(made))]
    made.close()
    return rows, nodes, features.stats.repaired


NAMES = ("manifest.json", "pool.extents", "plan.extents", *(f"{one}.extents.index" for one in ("pool", "plan", "rows")))


@pytest.mark.parametrize("name", NAMES)
def test_every_flip_is_named_with_its_file(world, tmp_path, name):
    graph, folder = world
    request, size = request_of(graph, folder, batch=64, disk=int(1.2 * graph.features.nbytes)), (folder / name).stat()
    places = np.random.default_rng(0).integers(0, size.st_size, 12)
    if name.endswith("extents"):  # what lies between extents is nobody's; lists of ids are read to pack rows again
        made = PackedSet([folder])
        one = made.pool.file if name.startswith("pool") else made.plan
        ends = [one.extent(extent) for extent in one if not extent.startswith(("cold", "segment", "bounds"))]
        made.close()
        places = [extent.offset + extent.bytes * at // 7 for extent in ends[:: max(1, len(ends) // 8)] for at in (0, 6)]
    for number, place in enumerate(places):
        with pytest.raises(UserError) as error:
            used(flipped(folder, tmp_path / str(number), name, [int(place)]), request)
        told = str(error.value)
        assert name.removesuffix(".index") in told or "was packed from other inputs" in told, (place, told)
        assert "pack it anew" in told or "packs it anew" in told, told


def test_flipped_rows_are_named_and_packed_again(world, tmp_path):
    graph, folder = world
    request = request_of(graph, folder, batch=64, disk=int(1.2 * graph.features.nbytes))
    rows, _, _ = used(folder, request)
    made = PackedSet([folder])
    extents = [made.rows.extent(name) for name in made.rows if made.rows.bytes(name)]
    made.close()
    assert {extent.name.split("/")[0] for extent in extents} == {"hot", "segment", "cold"}
    for extent in extents:
        place = extent.offset + extent.bytes * 2 // 3
        changed = flipped(folder, tmp_path / extent.name.replace("/", "-"), "rows.extents", [place])
        with pytest.raises(UserError, match=rf"Extent '{extent.name}' of .*is damaged"):
            used(changed, request)
        again, _, repaired = used(changed, request, repair=True)
        assert repaired == [extent.name]
        assert all(torch.equal(one, other) for one, other in zip(again, rows, strict=True))
        assert (changed / "rows.extents").read_bytes() == (folder / "rows.extents").read_bytes()


@pytest.mark.parametrize("disks", [1, 2])
def test_mapped_hot_rows_are_those_in_memory_and_take_none_of_their_own(tmp_path, disks):
    graph = graph_of(nodes=20_000, width=256, edges=40_000)
    folders = [tmp_path / str(number) for number in range(disks)]
    made = packed(graph, folders, batch=4000, memory=12_000 * 1024)

    def anonymous():
        text = Path("/proc/self/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0]) << 10

    before = anonymous()
    with TieredFeatures(made, ReaderOptions(shared=True)) as shared:
        shared.keep_near(50 * made.row.row_bytes)
        assert anonymous() - before < 6 << 20  # of 12 MiB of rows: indices and 50 rows
        with TieredFeatures(made) as own:
            own.keep_near(50 * made.row.row_bytes)
            assert torch.equal(shared.read(0), own.read(0))
            assert shared.stats.bytes() == own.stats.bytes()
    made.close()


def test_a_flipped_bit_of_gathered_hot_rows_is_named_and_they_are_gathered_again(tmp_path):
    graph = graph_of(nodes=600, width=100, edges=3000)
    made = packed(graph, [tmp_path / "a", tmp_path / "b"], batch=64, memory=40 * 400)
    rows, _ = made.map_hot()
    kept, file = rows.clone(), tmp_path / "a" / HOT_ROWS
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="hot"):
        made.map_hot()
    assert torch.equal(made.map_hot()[0], kept)
    assert sorted(one.name for one in (tmp_path / "a").glob("hot*")) == [HOT_ROWS]
    made.close()
