"""Record of MEGA, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="mega",
    title="MEGA: bits by node degree, a packed format for mixed widths, and edges condensed for sequential reads",
    aliases=("adaptive-package", "condense-edge"),
    paper="HPCA 2024, arXiv 2311.09775",
    files=(
        "mechanisms/few_bits/mega/",
        "mechanisms/few_bits/packed_spmm.py",
        "graph/data/condensed_file.py",
    ),
    chosen=(
        'quantized graph features of nodes that training has not seen: `quant.kind = "mega"`;'
        " its accelerator simulator runs on request only"
    ),
    cost=(
        "bytes = packages + bitmaps + index + degree table, counted apart; one write and one "
        "read per source of a cross-part edge"
    ),
    law="decoding a stream gives back every code; every cross-part edge is served exactly once",
    law_test="tests/mechanisms/few_bits/test_package.py::test_decoding_gives_back_every_code",
    bench="bench/mega.py",
    headline=(
        "on Cora hidden features of 128 columns take 15.22 times fewer bytes than fp32 and 2.02 times fewer than int4"
    ),
    state="works",
    limits=(
        "that costs accuracy on Cora: 73.8 % beside 79.4 % of fp32 (one seed); zstd of the "
        "same codes decodes faster; PubMed, NELL and Reddit are not measured"
    ),
    runs_on="November 2026: AMD EPYC, Intel Xeon; one NVIDIA H100; the paper's accelerator in a simulator",
)
