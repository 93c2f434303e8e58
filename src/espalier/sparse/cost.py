"""Predicted cost of one product of a sparse and a dense matrix; imports no torch."""

from __future__ import annotations

from espalier.recipe.cost import Cost, Number

MESSAGE_BYTES = 12e9
"""Bytes of dense rows that one core adds in a second, where no probe says better: 16 to 60 ns for rows of 512 bytes in
bench/cbm.py on a 2.5 GHz Xeon, the slower end."""


def cost(rows: Number, additions: Number, width: Number, threads: Number = 1) -> Cost:
    """Predicted cost of one product in float32, NumPy arrays allowed.

    Args:
        rows: of the matrix. width: columns of X.
        additions: rows of X added: the entries of a CSR matrix, `CBM.deltas.additions` of a compressed one, entries·k/
            width·4 for CBSR (a value scattered costs some four of a row that is added whole; MaxK's note on CPUs).
        threads: cores that share the work.
    """
    moved = 4.0 * width * (additions + rows)
    return Cost(
        seconds={"aggregate": moved / (MESSAGE_BYTES * threads)},
        memory_bytes={"adjacency": 4.0 * (additions + 4 * rows), "activations": 4.0 * width * rows},
        sources={"aggregate": "bytes of rows added at 12 GB/s for each core (bench/cbm.py)"},
    )
