"""Extent filler: pieces of any size give the container that whole tensors give; a resumed one has the same bytes."""

from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier.store.direct_io import DiskFull
from espalier.store.extent_filler import ExtentFiller
from espalier.store.extents import ExtentFile, ExtentWriter, index_path
from espalier.store.io_queue import IoQueue


def content(sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Random bytes of these sizes."""
    random = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random) for name, size in sizes.items()}


def fill(filler: ExtentFiller, data: dict[str, torch.Tensor], until: dict[str, int]) -> None:
    """Extends every extent up to `until` bytes, in two pieces."""
    for name, stop in until.items():
        begin = filler.filled[name]
        for first, last in ((begin, (begin + stop) // 2), ((begin + stop) // 2, stop)):
            room = filler.room(name, last - first)
            room.data.copy_(data[name][first:last])
            filler.extend(name, room, more=last < stop)


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_give_the_container_that_whole_tensors_give(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("extents")
    sizes = {str(at): data.draw(st.sampled_from((0, 1, 4095, 4096, 5000, 20_000))) for at in range(4)}
    bytes_ = content(sizes)
    with ExtentWriter(folder / "plain") as writer:
        for name, one in bytes_.items():
            writer.append(name, one)
    stops = [{name: data.draw(st.integers(0, size)) for name, size in sizes.items()} for _ in range(3)]
    before = dict.fromkeys(sizes, 0)
    queue = data.draw(st.sampled_from((None, IoQueue(threads=2))))
    filler = ExtentFiller(folder / "filled", sizes, queue=queue)
    for stop in stops:
        fill(filler, bytes_, {name: max(before[name], stop[name]) for name in sizes})
        filler.commit()
        before = dict(filler.filled)
        if data.draw(st.booleans()):  # killed within the next pieces, which were not committed
            fill(filler, bytes_, {name: (before[name] + size) // 2 for name, size in sizes.items()})
            filler.close()
            filler = ExtentFiller(folder / "filled", sizes, before, queue)
    fill(filler, bytes_, sizes)
    filler.finish()
    filler.close()
    if queue is not None:
        queue.close()
    assert (folder / "filled").read_bytes() == (folder / "plain").read_bytes()
    assert index_path(folder / "filled").read_bytes() == index_path(folder / "plain").read_bytes()


def test_a_container_is_found_only_when_it_is_full(tmp_path):
    sizes = {"a": 5000, "b": 10}
    data = content(sizes)
    with ExtentFiller(tmp_path / "file", sizes) as filler:
        fill(filler, data, {"a": 5000})
        with pytest.raises(AssertionError, match="'b' has 0 bytes"):
            filler.finish()
        assert not index_path(tmp_path / "file").exists()
        fill(filler, data, {"b": 10})
        filler.finish()
    with ExtentFile(tmp_path / "file") as file:
        assert torch.equal(file.read("a"), data["a"])
        assert torch.equal(file.read("b"), data["b"])


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(DiskFull, match="bytes more"):
            ExtentFiller(tmp_path / "file", {"a": 1 << 20, "b": 1 << 20})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
