"""Record of CBM, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="cbm",
    title="CBM: a binary matrix stored as differences between similar rows",
    aliases=("compressed binary matrix",),
    paper="IPDPS 2025, arXiv 2409.02208",
    files=("sparse/cbm/",),
    chosen=(
        "aggregation over a graph with many similar neighbourhoods, when entries / "
        "(differences + tree edges) is at least 1.15, or when it measured faster"
    ),
    cost=(
        "additions = width*(differences + tree edges), never more than width*entries; 4 bytes"
        " per difference and 16 per row; building counts the rows of A*A^T, or samples 48 "
        "candidates a row by MinHash where that is too much"
    ),
    law=(
        "its product equals the plain sparse product, of whole numbers to the bit, forward "
        "and backward, normalised or not; its tree is the cheapest arborescence"
    ),
    law_test="tests/sparse/test_cbm.py::test_products_of_whole_numbers_are_those_of_csr_to_the_bit",
    bench="bench/cbm.py",
    headline=(
        "on a graph of collaborations (128 columns, one thread) 11.77 times as fast as "
        "torch's CSR and 6.22 times as our CSR (n=5)"
    ),
    state="works",
    limits="binary matrices, and such with a scale for each row and column",
    runs_on="November 2026: Intel Xeon; one NVIDIA H100",
)
