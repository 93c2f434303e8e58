"""Logs of many frameworks are diagnosed as people labelled them; bad logs are told apart from good ones."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import pytest

from espalier import ops
from espalier.ops import restart_helps, rules
from espalier.ops.diagnosis import Means, diagnose
from espalier.ops.incidents import Incident
from espalier.ops.taxonomy import REASONS
from espalier.recipe.errors import UserError

HERE = Path(__file__).parent
LOGS = [
    log
    for name in ("infrastructure", "software", "tricky", "advice", "fresh")
    for log in tomllib.loads((HERE / f"logs-{name}.toml").read_text())["log"]
]
NEAR = 2


def of(tmp_path, text, name="a.log", means=Means()):  # noqa: B008
    path = tmp_path / name
    path.write_text(text)
    return diagnose(path, means)[0]


@pytest.mark.parametrize("log", LOGS, ids=[log["name"] for log in LOGS])
def test_a_labelled_log(tmp_path, log):
    found = of(tmp_path, log["text"])
    root = next(
        (at for at, line in enumerate(log["text"].splitlines(), 1) if log["root"] and log["root"] in line), None
    )
    assert (found.reason, found.action) == (log["reason"], log["action"])
    assert found.category == REASONS[log["reason"]].category
    assert found.root_line == root or (root is not None and abs(found.root_line - root) <= NEAR)
    if log["name"] != "ray-wrapped":  # an actor of Ray tells its address, never its rank
        assert (found.first_failing_rank, found.suspect_node) == (
            None if log["rank"] < 0 else log["rank"],
            log.get("node") or None,
        )


def test_the_shared_labelled_logs_meet_their_targets(data_folder):
    folder = data_folder / "failure-logs"
    if not folder.is_dir():
        pytest.skip("no labelled logs beside the tables")
    with (folder / "labels.csv").open() as file:
        labels = list(csv.DictReader(file))
    found = [diagnose(folder / row["file"])[0] for row in labels]
    both = list(zip(labels, found, strict=True))
    rooted = [(row, one) for row, one in both if row["root_line"]]
    assert sum(row["reason"] == one.reason for row, one in both) / len(both) >= 0.95
    assert sum(row["category"] == one.category for row, one in both) / len(both) >= 0.98
    assert sum(abs((one.root_line or -9) - int(row["root_line"])) <= NEAR for row, one in rooted) / len(rooted) >= 0.9
    assert not [row["file"] for row, one in both if one.action == "stop" != row["action"]]


# One line in the wording of the software that prints it, and the reason it speaks for.
SAID = [line.split(" <- ") for line in (HERE / "said.txt").read_text().splitlines()]


@pytest.mark.parametrize(("said", "reason"), SAID, ids=[f"{reason}: {said[:40]}" for said, reason in SAID])
def test_what_one_line_says(tmp_path, said, reason):
    text = f'step 1\nTraceback (most recent call last):\n  File "a.py", line 1, in f\n    x()\n{said}\n'
    assert of(tmp_path, text).reason == reason


def test_the_public_name_takes_several_logs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"KeyError: '{name}'\n")
    found = ops.diagnose([tmp_path / "a", tmp_path / "b"])
    assert [one.file for one in found] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert not any(map(restart_helps, found))


def test_an_empty_log_is_unknown_and_no_claim(tmp_path):
    found = of(tmp_path, "")
    assert (found.reason, found.root_line, found.source) == ("Unknown", None, "nothing")
    assert "empty" in found.advice


def test_what_no_rule_knows_is_unknown_and_may_be_started_again(tmp_path):
    found = of(tmp_path, "step 1\nERROR the flux capacitor is out of plutonium\n")
    assert (found.reason, found.root_line, found.action) == ("Unknown", 2, "retry")


def test_a_users_rule_wins(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("[[rule]]\nid = 'flux'\nreason = 'OS Error'\npatterns = ['flux capacitor']\nadvice = 'buy some'\n")
    means = Means(rules=rules.with_users(mine))
    found = of(tmp_path, "step 1\nRuntimeError: the flux capacitor is out\n", means=means)
    assert (found.reason, found.action, found.advice) == ("OS Error", "stop", "buy some")


def test_a_past_incident_explains_and_never_stops(tmp_path):
    past = Incident("ERROR the flux capacitor is out of plutonium again", "Key Error", "buy some")
    found = of(tmp_path, "step 1\nERROR the flux capacitor is out of plutonium\n", means=Means(incidents=(past,)))
    assert (found.reason, found.action, found.source) == ("Key Error", "retry", "incidents")


def test_a_root_deep_in_a_large_log_is_found(tmp_path):
    routine = "".join(f"step {at} loss 2.0\n" for at in range(20_000))
    found = of(
        tmp_path, routine + "[rank2]: IndexError: list index out of range\n" + "[rank1]: Connection closed by peer\n"
    )
    assert (found.reason, found.root_line, found.first_failing_rank) == ("Index Error", 20_001, 2)


def test_the_earlier_by_clock_wins_though_it_stands_later(tmp_path):
    text = "2025-01-01 00:00:09 rank 1: ValueError: second\n2025-01-01 00:00:05 rank 2: KeyError: 'first'\n"
    assert of(tmp_path, text).reason == "Key Error"


def test_a_failure_after_the_last_step_is_one(tmp_path):
    text = 'step 9 loss 1.0\ntraining complete\nTraceback (most recent call last):\n  File "a.py", line 1, in f\n'
    text += "OSError: [Errno 28] No space left on device\n"
    assert of(tmp_path, text).reason == "OS Error"


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "a.log").write_bytes(bytes(200))
    with pytest.raises(UserError, match="not a text file"):
        diagnose(tmp_path / "a.log")


def test_diagnosing_loads_no_torch():
    import subprocess
    import sys

    script = (
        "import sys, espalier.ops, espalier.launch.resilience, espalier.cli.diagnose\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
