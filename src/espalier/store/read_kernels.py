"""Compiled loops of many small reads: by pread, and by io_uring with many reads in flight. They run without the GIL.

`runs` [n, 3] int64: where each read begins in the file, its bytes, and where it goes in the buffer at address `base`.
Both return how many reads did not give all their bytes; `missed` [n] then begins with the numbers of those.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take their arrays one by one)

from numba import types

from espalier.kernels.numba_compile import jit

_pread = types.ExternalFunction("pread64", types.int64(types.int32, types.uintp, types.uintp, types.int64))
_syscall = types.ExternalFunction(
    "syscall", types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64)
)

ENTER = 426
"""Number of the system call io_uring_enter, on every architecture."""
GET_EVENTS = 1
READ = 22
"""IORING_OP_READ."""
FAILURES = 1000
"""Calls in a row that may fail (signals interrupt them, memory may be short) before reads go another way."""


@jit("int64(int64, int64, int64[:, ::1], int64[::1])")
def pread_runs(fd, base, runs, missed):  # type: ignore[no-untyped-def]
    """One read after the other."""
    count = 0
    for at in range(len(runs)):
        if _pread(fd, base + runs[at, 2], runs[at, 1], runs[at, 0]) != runs[at, 1]:
            missed[count] = at
            count += 1
    return count


@jit("int64(int64, int64, int64, int64[:, ::1], int64[::1], uint32[::1], uint32[::1], uint64[:, ::1])")
def uring_runs(ring, fd, base, runs, missed, shared, places, entries):  # type: ignore[no-untyped-def]
    """As many reads in flight as `entries` [depth, 8] has rows.

    `shared` is the memory of both queues; `places` say where in it are the submission queue's tail, mask and array, and
    the completion queue's head, tail, mask and entries. Completions are written by this thread inside the system call
    (IORING_SETUP_DEFER_TASKRUN), so no other processor changes what is read here.
    """
    tail, mask, array, head, ready, ready_mask, events = places
    issued = ended = count = fresh = failures = 0
    while ended < len(runs):
        while issued < len(runs) and issued - ended < len(entries):
            slot = shared[tail] & shared[mask]
            entries[slot, 0] = types.uint64(READ) | types.uint64(fd) << types.uint64(32)
            entries[slot, 1] = runs[issued, 0]
            entries[slot, 2] = base + runs[issued, 2]
            entries[slot, 3] = runs[issued, 1]
            entries[slot, 4] = issued
            shared[array + slot] = slot
            shared[tail] += types.uint32(1)
            issued += 1
            fresh += 1
        taken = _syscall(ENTER, ring, fresh, 1, GET_EVENTS, 0, 0)
        fresh -= max(taken, 0)
        failures = failures + 1 if taken < 0 else 0
        if failures > FAILURES and issued - ended == fresh:  # the kernel takes nothing more and holds nothing
            shared[tail] -= types.uint32(fresh)
            for at in range(issued - fresh, len(runs)):
                missed[count] = at
                count += 1
            break
        while shared[head] != shared[ready]:
            event = events + types.int64(shared[head] & shared[ready_mask]) * 4
            at = types.int64(shared[event])
            if types.int64(shared[event + 2]) != runs[at, 1]:
                missed[count] = at
                count += 1
            shared[head] += types.uint32(1)
            ended += 1
    return count
