"""Record of RTop-K, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="rtopk",
    title="RTop-K: the k largest of every row by bisecting a threshold",
    aliases=("rtop-k", "row-wise top-k", "maxk", "maxk-gnn"),
    paper="ICLR 2025, arXiv 2409.00822 (MaxK-GNN: ASPLOS 2024, arXiv 2312.08656)",
    files=("kernels/rtopk.py", "kernels/rtopk_cpu.py", "kernels/rtopk_gpu.py"),
    chosen="top-k over many short rows: sparse codecs, MaxK activations, routing",
    cost=(
        "rows * width * (steps + 2) elements read from cache, width from memory; 4 to 5 steps"
        " for normal rows, on the packed candidates alone from a width of 1024 on"
    ),
    law="the multiset of values equals torch.topk's for every input, ties, infinities and NaNs included",
    law_test="tests/kernels/test_rtopk.py::test_fast_form_finds_the_values_of_torch_topk",
    bench="bench/rtopk.py",
    headline=(
        "65,536 rows of 256, k = 32, on one thread: 7.07 times as fast as torch.topk and 8.60"
        " times as numpy.argpartition (n=9)"
    ),
    state="works",
    limits=(
        "processors with AVX2 or AVX-512; on an H100 the Triton form is 1.4 to 7.4 times as "
        "fast as torch.topk (wide bf16 rows 0.8)"
    ),
    runs_on="November 2026: Intel Xeon; one NVIDIA H100",
)
