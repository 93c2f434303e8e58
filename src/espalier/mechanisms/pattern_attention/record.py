"""Record of TorchGT, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="torchgt",
    title="TorchGT: graph transformers by interleaving edge attention with full attention, over clusters of nodes",
    aliases=("torch-gt", "graph transformer"),
    paper="SC 2024, arXiv 2407.14106",
    files=("mechanisms/pattern_attention/",),
    chosen="model.kind = graph-transformer with more nodes than full attention can hold",
    cost=(
        "local step: edges*width; full step (one in f): nodes^2*width; 4*S*h/P elements per "
        "rank and layer for the all-to-alls"
    ),
    law="edge, block and hybrid attention equal dense attention under the same mask, outputs and gradients",
    law_test="tests/mechanisms/pattern_attention/test_attention.py::test_every_plan_is_dense_masked_attention_in_float64",
    bench="bench/torchgt.py",
    headline=(
        "at 65,536 tokens of degree 20 a step is 4.30 times as fast as PyG's TransformerConv "
        "in 5.61 times less memory (n=3)"
    ),
    state="works",
    limits=(
        "1.1 times the speed of GPSConv's performer there, less below; accuracy is level with GCN where labels are few"
    ),
    runs_on="November 2026: Intel Xeon, AMD EPYC; one NVIDIA H100",
)
