"""Record of Hybrid compression, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="hybrid",
    title="Hybrid compression: one codec and rate for each kind of traffic (MPC without loss, ZFP at a fixed rate)",
    aliases=("hybrid-compression", "zhybrid", "mzhybrid", "zfp", "mpc"),
    paper="Xu, Anthony, Zhou et al., CCGrid, arXiv 2409.02423",
    files=("mechanisms/codecs/", "comm/compressed_collectives.py"),
    chosen=(
        "links between machines slower than the codec: min(coding, ratio * bandwidth) above "
        "1.2 times the bandwidth, with 1 / coding = 1 / encode + 1 / decode as measured by "
        "`espalier probe`"
    ),
    cost=(
        "fixed rates: header and rate/32 of the float32 bytes exactly; MPC and split: by "
        "content, at most +3.1 %; seconds = raw bytes / min(coding, ratio * bandwidth), since"
        " pieces are sent while others are coded"
    ),
    law=(
        "every lossless codec gives back every bit; ZFP's stream equals the reference's byte "
        "for byte; all ranks end with the same bits; with error feedback the sum of what "
        "arrives is the sum of what was sent, less the residuals"
    ),
    law_test="tests/comm/test_compressed_collectives.py::test_with_feedback_what_arrives_is_what_was_sent_less_the_residuals",
    bench="bench/hybrid.py",
    headline=(
        "all-reduce of 64 MiB over 50 Mbit/s: int8 is 3.80 times and int4 7.17 times as fast as Gloo's in fp32 (n=5)"
    ),
    state="works",
    limits="without a Triton form (all but int8, int4, int1, ZFP and MPC) codecs code tensors of a GPU on the host",
    runs_on="November 2026: 4 hosts simulated on Intel Xeon, Gloo and MPI; one NVIDIA H100",
)
