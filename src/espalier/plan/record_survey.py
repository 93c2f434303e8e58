"""Record of Survey, as `espalier explain` prints it."""

from espalier.recipe.records import Record

RECORD = Record(
    name="survey",
    title="Survey: the map of training systems, and the estimate that sums the parts' costs into a step",
    aliases=("training-systems survey", "estimate", "checklist"),
    paper="Duan et al., 2024, arXiv 2407.20018",
    files=(
        "plan/layout_estimate.py",
        "plan/step_time.py",
        "plan/memory_model.py",
        "plan/collective_time.py",
    ),
    chosen="always: every plan is priced by it, and docs/survey.md says which of its rows are answered",
    cost=(
        "step seconds = compute + exposed communication + optimizer; bytes held = parameters "
        "+ gradients + optimizer + activations at the worst moment"
    ),
    law="predicted bytes on the wire equal the ledger's, exactly",
    law_test="tests/plan/test_ledger.py::test_of_two_machines",
    bench="bench/choice.py",
    headline=(
        "the first choice of 7 kinds of layout is the fastest one at 50 Mbit/s (1.00), and "
        "has 0.76 times the fastest one's speed at 1,000 Mbit/s (n=3)"
    ),
    state="works",
    limits="links of two levels; predictions on GPUs were compared with published runs, and on one H100 only",
    runs_on="November 2026: 4 ranks on AMD EPYC; no GPU",
)
