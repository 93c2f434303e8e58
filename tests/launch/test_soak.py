"""A long run holds no more memory at its end than after its warm-up."""

from pathlib import Path

import pytest
from struck import Struck, recipe_of

STEPS, WARM = 20_000, 2_000


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_memory_is_flat_within_a_percent_over_twenty_thousand_steps(corpus: Path, tmp_path: Path) -> None:
    table = {"train": {"steps": STEPS, "validate_every": 1000}, "checkpoint": {"every": 1000}}
    run = Struck(recipe_of(corpus, **table), 2, tmp_path / "run", memory=1 << 26).run()
    memory = {event["step"]: event["memory"] for event in run.all("step")}
    assert len(memory) == STEPS
    assert memory[STEPS] <= 1.01 * memory[WARM], {step: memory[step] for step in range(WARM, STEPS + 1, WARM)}
    assert not run.all("incident")
