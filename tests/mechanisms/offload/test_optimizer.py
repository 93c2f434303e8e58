"""States that wait on disk: a step is the resident one's, to the bit, whatever the sizes of parameters and chunks."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from espalier.mechanisms.offload.optimizer import StateFolder
from espalier.optim import adamw, muon
from espalier.optim.base import OptimizerGroup, Owned
from espalier.plan.axes.offload_layout import AHEAD, Elements, extents
from espalier.recipe import Adamw, Muon
from espalier.recipe.errors import RunFailed, UserError

ADAMW = Adamw(learning_rate=1e-2, weight_decay=0.3)
MUON = Muon(learning_rate=1e-2, weight_decay=0.1, adamw=ADAMW)
PAGE = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


def owned(shapes, dtype=torch.float32):
    draw = torch.Generator().manual_seed(5)
    return [
        Owned(f"p{number}", nn.Parameter(torch.randn(shape, dtype=dtype, generator=draw)), torch.Size(shape))
        for number, shape in enumerate(shapes)
    ]


def gradients(parameters, step, missing=()):
    draw = torch.Generator().manual_seed(step)
    for one in parameters:
        grad = torch.randn(one.tensor.shape, dtype=one.tensor.dtype, generator=draw)
        one.tensor.grad = None if (one.name, step) in missing else grad.to(one.tensor.device)


def build(options, parameters, group):
    if isinstance(options, Muon):
        return muon.build(options, parameters, frozenset({"p0"}), group)
    return adamw.build(options, parameters, group)


def values(optimizer):
    return {
        key: value if isinstance(value, torch.Tensor) else value.values().view(value.shape)
        for key, value in optimizer.state_dict().items()
    }


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key].cpu(), other[key].cpu()) for key in one)


def compare(folder, options, shapes, chunk, dtype=torch.float32, missing=(), steps=4, kept=0):
    resident, away = owned(shapes, dtype), owned(shapes, dtype)
    plain = build(options, resident, OptimizerGroup)
    states = StateFolder(folder, "rank0", chunk)
    states.resident = kept
    ours = build(options, away, states.group)
    for step in range(steps):
        for parameters, optimizer in ((resident, plain), (away, ours)):
            gradients(parameters, step, missing)
            optimizer.step(1.0 / (step + 1))
    for mine, other in zip(away, resident, strict=True):
        assert torch.equal(mine.tensor, other.tensor), mine.name
    same(values(ours), values(plain))


SHAPES = st.lists(st.sampled_from([(), (1,), (7,), (3000,), (17, 61), (64, 64), (40, 130), (1, 5000)]), max_size=6)


KEPT = st.sampled_from([0, 0, 3 * PAGE, 9 * PAGE, 1 << 30])


@settings(deadline=None, max_examples=25)
@given(shapes=SHAPES, chunk=st.sampled_from([2 * PAGE, 6 * PAGE, 2**20]), dtype=st.sampled_from([32, 64]), kept=KEPT)
def test_adamw_on_disk_is_adamw_in_memory_to_the_bit(folder, shapes, chunk, dtype, kept):
    compare(folder, ADAMW, [(3, 4), *shapes], chunk, {32: torch.float32, 64: torch.float64}[dtype], kept=kept)


@settings(deadline=None, max_examples=10)
@given(shapes=SHAPES, skipped=st.integers(0, 5), kept=KEPT)
def test_muon_on_disk_is_muon_in_memory_to_the_bit_also_where_gradients_lack(folder, shapes, skipped, kept):
    shapes = [(13, 8), (24, 40), *shapes, (24, 40), (24, 40)]
    compare(folder, MUON, shapes, 2 * PAGE, missing={(f"p{skipped}", 1), (f"p{skipped}", 2)}, kept=kept)


def test_parameters_of_several_dtypes_and_adam_with_l2(folder):
    coupled = Adamw(learning_rate=1e-2, weight_decay=0.3, coupled=True)
    shapes = [(65, 100), (9,)]
    mixed = [owned(shapes) + [one._replace(name=f"{one.name}b") for one in owned(shapes, torch.float64)] for _ in "ab"]
    plain = build(coupled, mixed[0], OptimizerGroup)
    ours = build(coupled, mixed[1], StateFolder(folder, "rank0", 4 * PAGE).group)
    for step in range(3):
        for parameters, optimizer in zip(mixed, (plain, ours), strict=True):
            gradients(parameters, step)
            optimizer.step(1.0)
    assert all(torch.equal(one.tensor, other.tensor) for one, other in zip(*mixed, strict=True))


def test_pieces_cover_each_parameter_once_in_rows_of_whole_pages():
    sizes = [(0, 100_000), (1, 1), (2, 0), (3, 4097)]
    found = extents(Elements(sizes, 4), rows=2, chunk=64 * 1024)
    for number, count in sizes:
        pieces = [piece for extent in found for piece in extent.pieces if piece.number == number]
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])][: len(pieces)]
        assert (pieces[-1].stop if pieces else 0) == count
        assert all(piece.start % 16 == 0 for piece in pieces)
    assert all(extent.bytes <= 64 * 1024 and extent.row_bytes % PAGE == 0 for extent in found)
    assert [extent.offset for extent in found] == [sum(one.bytes for one in found[:n]) for n in range(len(found))]


def test_a_step_reads_and_writes_the_bytes_of_the_states(folder):
    parameters = owned([(300, 1000), (1000,)])
    states = StateFolder(folder, "rank0", 2**18)
    optimizer = build(ADAMW, parameters, states.group)
    gradients(parameters, 0)
    states.tier.meter.read()
    optimizer.step(1.0)
    moved = states.tier.meter.read()["disk"]
    assert moved["read"] == moved["written"] == pytest.approx(301_000 * 8, rel=0.02)
    assert moved["stalled"] >= 0
    for one in parameters:
        one.tensor.grad = None
    optimizer.step(1.0)
    assert states.tier.meter.read()["disk"]["read"] == 0  # what has no gradient stays where it is


def test_extents_are_read_ahead_in_buffers_that_are_written_before_they_are_used_again(folder):
    states = StateFolder(folder, "rank0", 2**16)
    file = build(ADAMW, owned([(300, 1000)]), states.group).file
    jobs = [(extent,) for extent in file.extents]
    for turn in range(3):
        for at, (values,) in enumerate(file.walk(jobs)):
            begun = jobs[: at + 1 + AHEAD]
            assert states.meter.read_bytes == sum(one.bytes for (one,) in begun)
            assert bool((values == turn).all())
            values.add_(1)
        written = states.meter.read()["disk"]["written"]
        assert written == sum(one.bytes for (one,) in jobs)


@pytest.mark.parametrize("threads", [2, 3])
def test_a_step_takes_half_of_the_threads_with_the_bits_of_all(folder, threads, monkeypatch):
    plain, used = adamw.AdamwStep.step, []
    monkeypatch.setattr(adamw.AdamwStep, "step", lambda self: used.append(torch.get_num_threads()) or plain(self))

    def steps():  # in a thread of its own: forks of a main thread that has computed in several would hang
        torch.set_num_threads(threads)
        compare(folder, ADAMW, [(1201, 333), (70_001,), (5,)], 2**19, steps=2)
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as apart:
        assert apart.submit(steps).result() == threads
    assert set(used) == {threads, 1}  # those of states in memory, and of states on disk


@pytest.mark.parametrize("kept", [0, 700_000, 10**9])
def test_states_that_fit_stay_in_memory_evenly_and_a_step_moves_the_others(folder, kept):
    states = StateFolder(folder, "rank0", 2**16)
    states.resident = kept
    optimizer = build(ADAMW, owned([(300, 1000)]), states.group)
    file, total = optimizer.file, sum(one.bytes for one in optimizer.file.extents)
    held = [one.bytes * (one.offset in file._resident) for one in file.extents]
    assert file.resident_bytes + states.resident == kept
    assert file.resident_bytes >= min(kept, total) - 2**16
    assert os.fstat(file._file.fd).st_size == total - file.resident_bytes
    for count in range(1, len(held)):  # of the first so many, in proportion
        seen = sum(one.bytes for one in file.extents[:count])
        assert -1 <= min(kept, total) * seen / total - sum(held[:count]) <= 2**16
    gradients(optimizer.owned, 0)
    optimizer.step(1.0)
    moved = states.meter.read()["disk"]
    assert moved["read"] == moved["written"] == total - file.resident_bytes


def test_a_flipped_bit_is_named(folder, monkeypatch):
    parameters = owned([(100, 100), (50, 100)])
    optimizer = build(ADAMW, parameters, StateFolder(folder, "rank0", 10 * PAGE).group)
    gradients(parameters, 0)
    optimizer.step(1.0)
    file = optimizer.file._file
    content = bytearray(os.pread(os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY), PAGE, 0))
    content[17] ^= 4
    os.pwrite(os.open(f"/proc/self/fd/{file.fd}", os.O_WRONLY), content, 0)
    with pytest.raises(RunFailed, match=r"offloaded of 'p0' in .* is not what was written there") as caught:
        optimizer.step(1.0)
    assert "goes on from the newest checkpoint, where there is one" in str(caught.value.do)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    if os.geteuid() == 0:
        (tmp_path / "file").write_text("")
        place = tmp_path / "file" / "offload"  # a file where the folder should be: also root cannot write there
    else:
        place = tmp_path / "folder"
        place.mkdir(mode=0o500)
    with pytest.raises(UserError, match=str(place.parent if os.geteuid() == 0 else place)):
        build(ADAMW, owned([(10, 10)]), StateFolder(place, "rank0").group)


def test_a_parameter_with_gaps_is_refused(folder):
    one = Owned("turned", nn.Parameter(torch.randn(8, 6).t()), torch.Size((6, 8)))
    with pytest.raises(UserError, match="'turned'"):
        build(ADAMW, [one], StateFolder(folder, "rank0").group)
