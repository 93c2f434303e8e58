"""What counts as memory: anonymous and shared pages, never those of files."""

import mmap
import os

import pytest
import torch

from espalier.machine import peak_memory as peak_memory_module
from espalier.machine.peak_memory import bytes_held, memory_of, peak_memory

MIB = 2**20
CPU = torch.device("cpu")


def in_fork(what):
    """What `what` returns in a process of its own, in MiB; its peak is its own too."""
    reader, writer = os.pipe()
    if not os.fork():
        code = 1
        try:
            os.write(writer, repr([one / MIB for one in what()]).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    return [float(one) for one in text.strip("[]").split(",")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("mapped") / "corpus"
    path.write_bytes(os.urandom(MIB) * 96)
    yield path
    path.unlink()


def test_reading_a_mapped_file_adds_nothing_to_memory(corpus):
    def life():
        before, cached = peak_memory(CPU), memory_of(CPU)["page_cache"]
        with corpus.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            total = sum(pages[:: mmap.PAGESIZE])
            yield from (peak_memory(CPU) - before, memory_of(CPU)["page_cache"] - cached)
        assert total

    grown, cached = in_fork(life)
    assert grown < 8
    assert cached > 90


@pytest.mark.parametrize("shared", [False, True])
def test_pages_of_its_own_and_shared_ones_count(shared):
    def life():
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        before = peak_memory(CPU), bytes_held()
        with mmap.mmap(-1, 96 * MIB, flags=flags | mmap.MAP_ANONYMOUS) as pages:
            pages.write(b"x" * len(pages))
            yield bytes_held() - before[1]
            peak_memory(CPU)
        yield bytes_held() - before[1]
        yield peak_memory(CPU) - before[0]

    during, after, most = in_fork(life)
    assert during > 95
    assert after < 10
    assert most > 95


def test_what_rose_and_fell_between_two_looks_counts_and_mapped_files_beside_it_do_not(corpus):
    def life():
        before = peak_memory(CPU)
        with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            pages.write(b"x" * 64 * MIB)
        yield peak_memory(CPU) - before
        with corpus.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            assert sum(pages[:: mmap.PAGESIZE])
            yield peak_memory(CPU) - before

    risen, then = in_fork(life)
    assert 55 < risen < 140  # the 64 MiB that are written from lie beside them
    assert then < risen + 8


@pytest.mark.parametrize("resets", [True, False])
def test_a_peak_below_an_earlier_one_of_mapped_files_counts_where_the_kernel_resets_its_own(
    corpus, monkeypatch, tmp_path, resets
):
    """Files once mapped and dropped lift the kernel's peak for good."""
    if not resets:
        monkeypatch.setattr(peak_memory_module, "_PEAK", tmp_path / "none" / "clear_refs")

    def life():
        with corpus.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            assert sum(pages[:: mmap.PAGESIZE])
            peak_memory(CPU)
        before = peak_memory(CPU)
        with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            for _ in range(64):
                pages.write(b"x" * MIB)
        yield peak_memory(CPU) - before

    (risen,) = in_fork(life)
    assert risen == pytest.approx(64 if resets else 0, abs=8)


def test_of_a_gpu_what_is_reserved_beyond_what_is_allocated_is_told_too(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 5 * MIB)
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: 7 * MIB)
    told = memory_of(torch.device("cuda", 0))
    assert (told["memory"], told["fragmentation"]) == (5 * MIB, 2 * MIB)
    assert "fragmentation" not in memory_of(CPU)
