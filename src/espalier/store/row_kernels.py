"""Compiled loops of rows on disk: which pages a list of rows needs, merged into runs, and rows out of those pages."""
# ruff: noqa: PLR0913, PLR0917  (kernels take their arrays one by one)

from numba import types

from espalier.kernels.numba_compile import jit

_copy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))


@jit("UniTuple(int64, 3)(int64[::1], int64[::1], int64, int64, int64, int64, int64, int64[:, ::1], int64[::1])")
def merge_rows(ids, order, start, offset, stride, size, longest, runs, places):  # type: ignore[no-untyped-def]
    """The reads for rows ids[order[start:]], as many as `runs` and `places` have room for; pages in ascending order.

    `offset`, `stride`, `size`: bytes to the first row, between rows, and of a row. `longest`: pages of a run beyond
    which a new one begins. `runs` [room in pages, 3] is filled with (offset, bytes, place in the buffer), `places` with
    where in the buffer each row begins. Returns (rows placed, runs, pages).
    """
    count = used = 0
    after = -1  # the page behind the last one read
    rows = min(len(places), len(order) - start)
    for at in range(rows):
        begin = offset + ids[order[start + at]] * stride
        first = begin >> 12
        behind = ((begin + size - 1) >> 12) + 1
        unread = first if first > after else after  # the first page that is not read yet
        fresh = behind - unread
        if fresh > 0:
            if used + fresh > len(runs):
                return at, count, used
            if unread == after and runs[count - 1, 1] + (fresh << 12) <= longest << 12:
                runs[count - 1, 1] += fresh << 12
            else:
                runs[count, 0] = unread << 12
                runs[count, 1] = fresh << 12
                runs[count, 2] = used << 12
                count += 1
            used += fresh
            after = behind
        places[at] = ((used - after) << 12) + begin
    return rows, count, used


@jit("(int64, int64[::1], int64[::1], int64, int64)")
def scatter_rows(table, places, order, out, size):  # type: ignore[no-untyped-def]
    """Row order[k] of `out` = the `size` bytes at places[k] of `table`; both are addresses."""
    for at in range(len(order)):
        _copy(out + order[at] * size, table + places[at], size)
