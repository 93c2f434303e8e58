"""Record of LoongTrain, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="loongtrain",
    title="LoongTrain: attention split two ways, over heads and over the sequence, with a double ring",
    aliases=("loong-train", "2d attention", "double ring"),
    paper="arXiv 2406.18485",
    files=(
        "mechanisms/sequence_parallel/",
        "parallel/ulysses.py",
        "parallel/sequence_slots.py",
        "plan/axes/sequence.py",
        "kernels/merge.py",
    ),
    chosen="a sequence whose activations do not fit one rank, or more sequence ranks than there are key-value heads",
    cost=(
        "all-to-alls of q, k, v and output inside the head group, plus outer steps of "
        "max(inner ring of max(compute, block transfer), outer block transfer) over the "
        "context group"
    ),
    law=(
        "outputs and gradients equal attention over the whole sequence, for every grid of "
        "heads and context, and the ledger's bytes are the formula's"
    ),
    law_test="tests/mechanisms/sequence_parallel/test_loongtrain.py::test_every_cut_equals_one_device",
    bench="bench/loongtrain.py",
    headline=(
        "on 2 nodes of 4 ranks at 50 Mbit/s the double ring is 1.50 times as fast as a single"
        " ring, and 0.88 times as heads 4 x context 2 (n=7)"
    ),
    state="works",
    limits="on GPUs bf16 rings call PyTorch's FlashAttention, which has not run there",
    runs_on="November 2026: 4 to 8 ranks on AMD EPYC; two ranks on one NVIDIA H100",
)
