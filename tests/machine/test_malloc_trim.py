"""Memory that malloc keeps between pieces that are held goes back to the kernel when asked for."""

import ctypes

import pytest

from espalier.machine import malloc_trim
from espalier.machine.peak_memory import bytes_held

SIZE, COUNT = 2**16, 512

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")


def test_pages_between_what_is_held_are_given_back():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    malloc_trim.give_back()
    pieces = [library.malloc(SIZE) for _ in range(COUNT)]
    try:
        for piece in pieces:
            ctypes.memset(piece, 1, SIZE)
        for piece in pieces[::2]:
            library.free(piece)
        before = bytes_held()
        malloc_trim.give_back()
        assert before - bytes_held() >= 0.8 * SIZE * COUNT / 2
        assert all(ctypes.string_at(piece, SIZE) == b"\1" * SIZE for piece in pieces[1::2])
    finally:
        for piece in pieces[1::2]:
            library.free(piece)
