"""examples/offload.toml trains as it stands, on small limits."""

import json
from pathlib import Path

import pytest
from programs import MACHINE, forked

EXAMPLE = Path(__file__).parents[3] / "examples" / "offload.toml"
SMALL = [
    "model.depth=1", "model.width=64", "train.steps=3", "train.batch_tokens=512", "train.sequence=64",
    "train.validate_tokens=512", "plan.trial=false", "plan.pin.ranks=1",
]  # fmt: skip


DISK = '[[nodes.disks]]\npath = "/"\nread = 1e9\nwrite = 1e9\niops = 1e4\niops_parallel = 5e4\ndirect = true\n'


def train(folder, *changes):
    cluster = folder.parent / "cluster.toml"
    cluster.write_text(MACHINE + DISK)
    asked = [*SMALL, f"plan.cluster={cluster}", *changes]
    done = forked(folder.parent, "train", str(EXAMPLE), *asked, "--run", str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "step"]


@pytest.mark.slow
def test_the_example_trains_and_its_report_says_what_moved(tmp_path):
    away, here = train(tmp_path / "away"), train(tmp_path / "here", "plan.pin.offload=none")
    assert [event["loss"] for event in away] == [event["loss"] for event in here]
    assert [event["gradient_norm"] for event in away] == [event["gradient_norm"] for event in here]
    assert all(event["offload"]["disk"]["read"] == event["offload"]["disk"]["written"] > 0 for event in away)
    assert all("offload" not in event for event in here)
    page = (tmp_path / "away" / "report.html").read_text()
    assert "states on disk" in page
    assert "for them" in page
