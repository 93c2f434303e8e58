"""Record of A2Q, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="a2q",
    title="A2Q: a bit width and step size learned for every node",
    aliases=("a-2q", "aggregation-aware quantization"),
    paper="ICLR 2023, arXiv 2302.00193",
    files=("mechanisms/few_bits/",),
    chosen=(
        'by the recipe: `quant.kind = "a2q"`, for graph models whose features, not weights, '
        "fill memory or the wire; `quant.target`, bytes of codes, chooses the widths"
    ),
    cost=(
        "bytes = sum over nodes of (columns * bits(node) + 12) / 8, 12 bits for bit-width and"
        " step; one more gradient for step and bits per row"
    ),
    law="unpacked codes times step equal the fake-quantized values bit for bit, for every width from 1 to 8",
    law_test="tests/mechanisms/few_bits/test_a2q.py::test_unpacked_codes_times_steps_are_the_quantized_values_bit_for_bit",
    bench="bench/a2q.py",
    headline=(
        "on Cora (64 columns) hidden features take 17.47 times fewer bytes than fp32 and 1.14"
        " times fewer than uniform 2-bit rows, at fp32's accuracy (10 seeds)"
    ),
    state="works",
    limits=(
        "1 to 3 points below fp32 on CiteSeer; a training step takes 1.5 to 3 times the CPU "
        "time of fp32; PubMed is not measured"
    ),
    runs_on="November 2026: AMD EPYC, Intel Xeon; one NVIDIA H100",
)
