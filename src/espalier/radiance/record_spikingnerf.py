"""Record of SpikingNeRF, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="spikingnerf",
    title="SpikingNeRF: spiking colour networks that take the samples along a ray as time steps",
    aliases=("spiking-nerf", "spinerf"),
    paper="Frontiers in Neuroscience 2025, arXiv 2309.10987",
    files=("radiance/spikingnerf.py", "radiance/lif_cpu.py"),
    chosen="model.kind = spikingnerf; never by itself, since it trades picture quality for energy",
    cost=(
        "energy = 4.6 pJ * multiply-accumulates + 0.9 pJ * additions (45 nm), counted by "
        "operation: a model, not a measurement"
    ),
    law="the ragged scan equals the padded one spike for spike, and their gradients to 1e-6",
    law_test="tests/radiance/test_spikingnerf.py::test_ragged_and_padded_scans_fire_the_same_spikes",
    bench="bench/spikingnerf.py",
    headline=(
        "a colour network of 128 neurons needs 3.62 times less energy by the paper's formula "
        "than a plain one after as many steps (n=3)"
    ),
    state="works",
    limits=(
        "energy is a model; the whole field needs 4 % less with DRAM; quality is measured on "
        "two scenes, not trained to their end"
    ),
    runs_on="November 2026: Intel Xeon, AMD EPYC; one NVIDIA H100",
)
