"""DRAM requests of a trace in order, in numba: see dram.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.kernels.numba_compile import jit

QUEUE = 32


@jit("int64[::1](int64[:, ::1], int64[::1], int64)")
def serve(requests: Any, timings: Any, timed: Any) -> Any:
    """`requests` [n, 5]: channel, bank, row, arrival, write. Last cycle, row hits, activations, cycles of latency in
    all, writes."""
    cl, cwl, rcd, rp, ras, rrd, ccd, ccd_long, faw = timings[:9]
    wr, wtr, transfer, groups, banks, channels = timings[9:]
    each = groups * banks
    opened = np.full((channels, each), -1, np.int64)
    free = np.zeros((channels, each), np.int64)  # when a bank takes its next column command
    since = np.full((channels, each), -1000000, np.int64)  # its last activation
    closable = np.zeros((channels, each), np.int64)
    column = np.full(channels, -1000000, np.int64)
    group = np.full(channels, -1, np.int64)
    turned = np.zeros(channels, np.int64)
    acts = np.full((channels, 4), -1000000, np.int64)
    done = np.zeros((channels, QUEUE), np.int64)
    served = np.zeros(channels, np.int64)
    last, hits, opens, waited, wrote = 0, 0, 0, 0, 0
    for i in range(len(requests)):
        c, b, row, arrival, write = requests[i]
        slot = served[c] % QUEUE
        begin = max(arrival, done[c, slot])
        at = max(begin, free[c, b])
        if opened[c, b] == row:
            hits += 1
        else:
            if opened[c, b] >= 0:
                at = max(at, closable[c, b], since[c, b] + ras) + rp
            turn = max(at, acts[c, 3] + rrd, acts[c, 0] + faw)
            acts[c, 0], acts[c, 1], acts[c, 2] = acts[c, 1], acts[c, 2], acts[c, 3]
            acts[c, 3] = turn
            since[c, b], opened[c, b] = turn, row
            at = turn + rcd
            opens += 1
        own = b // banks
        at = max(at, column[c] + (ccd_long if own == group[c] else ccd), column[c] + transfer)
        if not write:
            at = max(at, turned[c])
        column[c], group[c] = at, own
        end = at + (cwl if write else cl) + transfer
        if write:
            wrote += 1
            turned[c] = max(turned[c], end + wtr)
            closable[c, b] = max(closable[c, b], end + wr)
        else:
            closable[c, b] = max(closable[c, b], at + transfer)
        free[c, b] = at
        done[c, slot] = end
        served[c] += 1
        waited += end - (arrival if timed else begin)
        last = max(last, end)
    return np.array([last, hits, opens, waited, wrote], np.int64)
