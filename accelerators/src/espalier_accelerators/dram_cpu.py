"""DRAM commands of a trace, cycle by cycle, in numba: see dram.py.

State is kept in int64 arrays, all banks of all channels in one: for each bank its open row and from when on it takes
each command, for each group of banks and each rank what commands to their other banks allow, for each channel its
queues of request numbers. Cycles in which nothing can happen are passed over.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from espalier.kernels.numba_compile import jit, njit

NEVER = 1 << 60
# Columns of a request.
CHANNEL, BANK, ROW, ARRIVAL, WRITES, BLOCK = range(6)
# Timings, in the order of dram.TIMINGS.
CL, CWL, RCD, RCDWR, RP, RAS, RRD, RRD_LONG, CCD, CCD_LONG, FAW, AW32, WR, WTR, WTR_LONG, RTP, RTRS, PPD = range(18)
REFI, RFC, TRANSFER, RANKS, GROUPS, BANKS, CHANNELS, QUEUE, WINDOW, BY_RANK, DUAL, MERGE = range(18, 30)
# Of a bank: its open row (-1: none), columns taken since it was opened, the cycle from which each command is allowed.
OPEN, USED, ACT, READ, WRITE, PRE, REF = range(7)
# Of a rank: from when on its banks may be closed, how many are open, since when none is, cycles without an open one,
# activations so far.
CLOSABLE, OPENED, IDLE_SINCE, IDLE, ACTS = range(5)
# Of a channel: the queue that was served last, writes still to drain, lengths of its windows of reads and of writes,
# requests in command queues, the next refresh, refreshes due and the rank of the first, whether no request is to come.
TURN, DRAIN, READS, HELD, QUEUED, NEXT_REF, DUE, DUE_RANK, ENDED = range(9)
# Counts of all channels.
LAST, HITS, OPENS, REFRESHES, READ_COMMANDS, WRITE_COMMANDS, LEFT = range(7)
# What is given for each request: the cycles at which it is taken and answered, the next that waits for the same block.
TAKEN, ANSWERED, ALSO = range(3)
NOTHING, OPENS_ROW, CLOSES_ROW, MOVES = range(4)


class State(NamedTuple):
    """What `serve` is given and finds, and arrays with a row for each bank, group, rank, rank again (its last 32
    activations), channel, queue (two of them) and channel."""

    times: Any
    requests: Any
    ends: Any
    totals: Any
    banks: Any
    groups: Any
    ranks: Any
    acts: Any
    channel: Any
    queues: Any
    lengths: Any
    reads: Any
    held: Any
    wakes: Any


@njit
def _pick(m: Any, now: Any, c: Any, refreshing: Any) -> Any:
    """The first command of channel `c` that may be given now, queue by queue in turn: (what, queue, place in it, cycle
    from which some command may be given)."""
    count = m.times[RANKS] if m.times[BY_RANK] else m.times[RANKS] * m.times[GROUPS] * m.times[BANKS]
    each = count // m.times[RANKS]  # queues of a rank
    soonest = NEVER
    for _ in range(count):
        m.channel[c, TURN] = (m.channel[c, TURN] + 1) % count
        q = c * count + m.channel[c, TURN]
        if m.lengths[q] == 0 or refreshing == q // each:
            continue
        for k in range(m.lengths[q]):
            i = m.queues[q, k]
            b, write = m.requests[i, BANK], m.requests[i, WRITES]
            g, r = b // m.times[BANKS], b // (m.times[BANKS] * m.times[GROUPS])
            if m.banks[b, OPEN] < 0:
                what, at = OPENS_ROW, max(m.banks[b, ACT], m.groups[g, ACT])
                at = max(at, m.acts[r, (m.ranks[r, ACTS] + 28) % 32] + m.times[FAW])
                if m.times[AW32] > 0:
                    at = max(at, m.acts[r, m.ranks[r, ACTS] % 32] + m.times[AW32])
            elif m.banks[b, OPEN] == m.requests[i, ROW]:
                column = WRITE if write else READ
                what, at = MOVES, max(m.banks[b, column], m.groups[g, column])
            else:
                what, at = CLOSES_ROW, max(m.banks[b, PRE], m.ranks[r, CLOSABLE])
                if not _may_close(m, q, k, b):
                    continue
            if at <= now:
                return what, q, k, at
            soonest = min(soonest, at)
            if what == OPENS_ROW and not m.times[BY_RANK]:
                break
    return NOTHING, 0, 0, soonest


@njit
def _may_close(m: Any, q: Any, k: Any, b: Any) -> Any:
    """Whether request `k` of a queue may close the row of its bank `b`: it is the bank's first, and no other waits for
    that row, or four have had it."""
    for j in range(m.lengths[q]):
        i = m.queues[q, j]
        if m.requests[i, BANK] == b and (j < k or (m.banks[b, USED] < 4 and m.requests[i, ROW] == m.banks[b, OPEN])):
            return False
    return True


@njit
def _not_before(table: Any, row: Any, command: Any, cycle: Any) -> None:
    """From `cycle` on at the earliest."""
    table[row, command] = max(table[row, command], cycle)


@njit
def _open_row(m: Any, now: Any, b: Any, row: Any) -> None:
    own_group = b // m.times[BANKS]
    r = own_group // m.times[GROUPS]
    m.banks[b, OPEN], m.banks[b, USED] = row, 0
    _not_before(m.banks, b, ACT, now + m.times[RAS] + m.times[RP])
    _not_before(m.banks, b, READ, now + m.times[RCD])
    _not_before(m.banks, b, WRITE, now + m.times[RCDWR])
    _not_before(m.banks, b, PRE, now + m.times[RAS])
    for g in range(r * m.times[GROUPS], (r + 1) * m.times[GROUPS]):
        _not_before(m.groups, g, ACT, now + (m.times[RRD_LONG] if g == own_group else m.times[RRD]))
    m.acts[r, m.ranks[r, ACTS] % 32] = now
    m.ranks[r, ACTS] += 1
    if m.ranks[r, OPENED] == 0:
        m.ranks[r, IDLE] += now - m.ranks[r, IDLE_SINCE]
    m.ranks[r, OPENED] += 1
    m.totals[OPENS] += 1


@njit
def _close_row(m: Any, now: Any, b: Any) -> None:
    r = b // (m.times[BANKS] * m.times[GROUPS])
    m.banks[b, OPEN], m.banks[b, USED] = -1, 0
    _not_before(m.banks, b, ACT, now + m.times[RP])
    _not_before(m.banks, b, REF, now + m.times[RP])
    _not_before(m.ranks, r, CLOSABLE, now + m.times[PPD])
    m.ranks[r, OPENED] -= 1
    if m.ranks[r, OPENED] == 0:
        m.ranks[r, IDLE_SINCE] = now


@njit
def _move(m: Any, now: Any, b: Any, write: Any) -> None:
    """A read or a write of an open row."""
    own_group, burst, each = b // m.times[BANKS], m.times[TRANSFER], m.times[RANKS] * m.times[GROUPS]
    m.totals[HITS] += m.banks[b, USED] > 0
    m.banks[b, USED] += 1
    end = burst + (m.times[CWL] if write else m.times[CL])
    _not_before(m.banks, b, PRE, now + (end + m.times[WR] if write else m.times[RTP]))
    m.totals[WRITE_COMMANDS if write else READ_COMMANDS] += 1
    m.totals[LAST] = max(m.totals[LAST], now + end)
    for g in range(own_group // each * each, own_group // each * each + each):
        again = max(burst, m.times[CCD_LONG] if g == own_group else m.times[CCD])
        if g // m.times[GROUPS] != own_group // m.times[GROUPS]:  # another rank
            again = burst if write else burst + m.times[RTRS]
            turned = m.times[CWL] + burst + m.times[RTRS] - m.times[CL]
        else:
            turned = end + (m.times[WTR_LONG] if g == own_group else m.times[WTR])
        if not write:
            turned = m.times[CL] + burst + m.times[RTRS] - m.times[CWL]
        same, other = (WRITE, READ) if write else (READ, WRITE)
        _not_before(m.groups, g, same, now + again)
        _not_before(m.groups, g, other, now + turned)


@njit
def _refresh(m: Any, now: Any, c: Any) -> Any:
    """Closes a bank of the rank to be refreshed, or refreshes it: (whether a command was given, when one may be)."""
    r, each = m.channel[c, DUE_RANK], m.times[BANKS] * m.times[GROUPS]
    soonest, ready = NEVER, 0
    for b in range(r * each, (r + 1) * each):
        at = max(m.banks[b, PRE], m.ranks[r, CLOSABLE]) if m.banks[b, OPEN] >= 0 else m.banks[b, REF]
        if at > now:
            soonest = min(soonest, at)
        elif m.banks[b, OPEN] >= 0:
            _close_row(m, now, b)
            return True, now + 1
        else:
            ready += 1
    if ready < each:
        return False, soonest
    for b in range(r * each, (r + 1) * each):
        _not_before(m.banks, b, ACT, now + m.times[RFC])
        _not_before(m.banks, b, REF, now + m.times[RFC])
    m.channel[c, DUE] -= 1
    m.channel[c, DUE_RANK] = c * m.times[RANKS] + (r + 1) % m.times[RANKS]
    m.totals[REFRESHES] += 1
    return True, now + 1


@njit
def _give(m: Any, now: Any, c: Any, choice: Any) -> None:
    """Gives the command that `_pick` found."""
    what, q, k, _ = choice
    i = m.queues[q, k]
    b, write = m.requests[i, BANK], m.requests[i, WRITES]
    if what == OPENS_ROW:
        _open_row(m, now, b, m.requests[i, ROW])
    elif what == CLOSES_ROW:
        _close_row(m, now, b)
    else:
        _move(m, now, b, write)
        for j in range(k, m.lengths[q] - 1):
            m.queues[q, j] = m.queues[q, j + 1]
        m.lengths[q] -= 1
        m.channel[c, QUEUED] -= 1
        m.totals[LEFT] -= write
        while i >= 0 and not write:  # all reads of one block are answered together
            m.ends[i, ANSWERED] = now + m.times[CL] + m.times[TRANSFER]
            m.totals[LEFT] -= 1
            i = m.ends[i, ALSO]


@njit
def _schedule(m: Any, c: Any) -> Any:
    """Moves a request to the queue of its bank, a write while writes are drained: whether anything changed."""
    if m.channel[c, DRAIN] == 0:
        alone = m.channel[c, ENDED] and m.channel[c, READS] == 0
        most = m.times[WINDOW] - 1 if m.channel[c, QUEUED] > 0 else 0 if alone else 8
        if m.channel[c, HELD] > most:
            m.channel[c, DRAIN] = m.channel[c, HELD]
    if m.channel[c, DRAIN] > 0:
        moved = _enqueue(m, c, m.held, 1)
        if moved >= 0 or m.channel[c, QUEUED] > 0:
            return moved != 0
        # A write waits for a read that waits for writes (DRAMsim3 would wait forever): the read goes first.
    return _enqueue(m, c, m.reads, 0) != 0


@njit
def _enqueue(m: Any, c: Any, window: Any, write: Any) -> Any:
    """Moves the first request of a window whose queue has room: 1; 0: there is none; -1: it writes what is still to be
    read."""
    which = HELD if write else READS
    each = m.times[BANKS] * m.times[GROUPS] if m.times[BY_RANK] else 1
    for k in range(m.channel[c, which]):
        i = window[c, k]
        q = m.requests[i, BANK] // each
        if m.lengths[q] >= m.times[QUEUE]:
            continue
        if write:
            if m.times[MERGE] and _waiting(m, i, 0, c, q) >= 0:
                m.channel[c, DRAIN] = 0
                return -1
            m.channel[c, DRAIN] -= 1
        m.queues[q, m.lengths[q]] = i
        m.lengths[q] += 1
        m.channel[c, QUEUED] += 1
        for j in range(k, m.channel[c, which] - 1):
            window[c, j] = window[c, j + 1]
        m.channel[c, which] -= 1
        return 1
    return 0


@njit
def _waiting(m: Any, i: Any, write: Any, c: Any, q: Any) -> Any:
    """The request that reads (or writes) the block of request `i` and waits, or -1."""
    block = m.requests[i, BLOCK]
    window, count = (m.held, m.channel[c, HELD]) if write else (m.reads, m.channel[c, READS])
    for k in range(count):
        if m.requests[window[c, k], BLOCK] == block:
            return window[c, k]
    for k in range(m.lengths[q]):
        if m.requests[m.queues[q, k], BLOCK] == block and m.requests[m.queues[q, k], WRITES] == write:
            return m.queues[q, k]
    return -1


@njit
def _accept(m: Any, now: Any, i: Any) -> Any:
    """Takes a request into its channel's window, unless that is full: whether it did."""
    c, write = m.requests[i, CHANNEL], m.requests[i, WRITES]
    window, which = (m.held, HELD) if write else (m.reads, READS)
    if m.channel[c, which] >= m.times[WINDOW]:
        return False
    m.ends[i, TAKEN] = now
    if write:
        m.ends[i, ANSWERED] = now + 1
    q = m.requests[i, BANK] // (m.times[BANKS] * m.times[GROUPS] if m.times[BY_RANK] else 1)
    if m.times[MERGE] and _waiting(m, i, 1, c, q) >= 0:  # written again, or read from the window of writes
        m.ends[i, ANSWERED] = now + 1
        m.totals[LAST] = max(m.totals[LAST], now + 1)
        m.totals[LEFT] -= 1
        return True
    same = _waiting(m, i, 0, c, q) if m.times[MERGE] and not write else -1
    if same >= 0:
        m.ends[i, ALSO], m.ends[same, ALSO] = m.ends[same, ALSO], i
        return True
    window[c, m.channel[c, which]] = i
    m.channel[c, which] += 1
    return True


@njit
def _tick(m: Any, now: Any, c: Any) -> None:
    """A cycle of channel `c`."""
    if now == m.channel[c, NEXT_REF]:
        m.channel[c, DUE] += 1
        m.channel[c, NEXT_REF] += m.times[REFI] // m.times[RANKS]
    refreshing, given, soonest = -1, NOTHING, m.channel[c, NEXT_REF]
    if m.channel[c, DUE] > 0:
        refreshing = m.channel[c, DUE_RANK]
        done, at = _refresh(m, now, c)
        soonest = min(soonest, at)
        given = CLOSES_ROW if done else NOTHING
        if m.channel[c, DUE] == 0 or m.channel[c, DUE_RANK] != refreshing:
            refreshing = -1
    for second in range(int(given != NOTHING), 2 if m.times[DUAL] else 1):
        choice = _pick(m, now, c, refreshing)
        soonest = min(soonest, choice[3])
        if choice[0] == NOTHING or (second and (choice[0] == MOVES) == (given == MOVES)):
            break
        given = choice[0]
        _give(m, now, c, choice)
    moved = _schedule(m, c)
    m.wakes[c] = now + 1 if given != NOTHING or moved else soonest


@njit
def _run(m: Any, i: Any, stop: Any, low: Any, high: Any) -> None:
    """Serves the requests from `i` to before `stop`, of channels from `low` to before `high`."""
    m.totals[LEFT], now = stop - i, 0
    while m.totals[LEFT] > 0:
        for c in range(low, high):
            if m.wakes[c] <= now:
                _tick(m, now, c)
        front = NEVER
        if i < stop and m.requests[i, ARRIVAL] <= now and _accept(m, now + 1, i):
            m.wakes[m.requests[i, CHANNEL]], front, i = now + 1, now + 1, i + 1
            if i == stop:
                m.channel[low:high, ENDED] = 1
                m.wakes[low:high] = np.minimum(m.wakes[low:high], now + 1)
        if i < stop and m.requests[i, ARRIVAL] > now:
            front = m.requests[i, ARRIVAL]
        for c in range(low, high):
            front = min(front, m.wakes[c])
        now = front


@jit("int64[::1](int64[:, ::1], int64[::1], int64[::1], int64[:, ::1])")
def serve(requests: Any, starts: Any, times: Any, ends: Any) -> Any:
    """`requests` [n, 6]: channel, bank among those of all channels, row, arrival, write, block; those of each stream
    `starts[s]:starts[s + 1]`, in order: one is taken in a cycle. One stream feeds all channels, or each its own.
    `ends` [n, 3], all -1, gets the cycles at which requests are taken and answered. Returns the counts above, the last
    one instead cycles of all ranks without an open row."""
    channels, ranked = times[CHANNELS], times[CHANNELS] * times[RANKS]
    total = ranked * times[GROUPS] * times[BANKS]
    banks, groups = np.zeros((total, 7), np.int64), np.zeros((ranked * times[GROUPS], 5), np.int64)
    banks[:, OPEN] = -1
    ranks, acts = np.zeros((ranked, 5), np.int64), np.full((ranked, 32), -NEVER, np.int64)
    channel = np.zeros((channels, 9), np.int64)
    channel[:, NEXT_REF] = times[REFI] // times[RANKS]
    channel[:, DUE_RANK] = np.arange(channels) * times[RANKS]
    lengths = np.zeros(ranked if times[BY_RANK] else total, np.int64)
    queues = np.zeros((len(lengths), times[QUEUE]), np.int64)
    reads, unserved = np.zeros((channels, times[WINDOW]), np.int64), np.zeros((channels, times[WINDOW]), np.int64)
    wakes = channel[:, NEXT_REF].copy()
    totals = np.zeros(7, np.int64)
    state = State(
        times, requests, ends, totals, banks, groups, ranks, acts, channel, queues, lengths, reads, unserved, wakes
    )
    for s in range(len(starts) - 1):
        low, high = (0, channels) if len(starts) == 2 else (s, s + 1)
        _run(state, starts[s], starts[s + 1], low, high)
    totals[LEFT] = 0
    for r in range(ranked):
        idle = max(0, totals[LAST] - ranks[r, IDLE_SINCE]) if ranks[r, OPENED] == 0 else 0
        totals[LEFT] += ranks[r, IDLE] + idle
    return totals
