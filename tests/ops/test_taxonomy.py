"""The taxonomy is Acme's, and says what to do of everything in it."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from espalier.ops import Diagnosis, EvidenceLine, restart_helps
from espalier.ops.taxonomy import ACTIONS, REASONS, as_dict


def test_the_reasons_are_the_29_of_the_study_and_five_of_ours():
    # Table of failures of arXiv 2403.07648: 9 of infrastructure, 9 of frameworks, 11 of scripts.
    count = Counter(kind.category for kind in REASONS.values())
    ours = {"Version Mismatch": "Framework", "Hang": "Other", "Loss Anomaly": "Other", "No Failure": "Other"}
    assert {reason: REASONS[reason].category for reason in ours} == ours
    assert count == {"Infrastructure": 9, "Framework": 9 + 1, "Script": 11, "Other": 4}


def test_every_reason_has_an_action_and_advice():
    assert all(kind.action in ACTIONS and kind.advice for kind in REASONS.values())


@pytest.mark.parametrize(("action", "helps"), list(zip(ACTIONS, [True, True, True, False, False], strict=True)))
def test_a_restart_helps_unless_a_person_must_act(action, helps):
    assert restart_helps(Diagnosis("x", "Other", "Unknown", None, None, None, action)) is helps


def test_a_diagnosis_is_json():
    one = Diagnosis(
        "a.log", "Script", "Key Error", 3, 0, None, "stop", (EvidenceLine(3, "KeyError: 'k'", "the cause"),)
    )
    table = json.loads(json.dumps(as_dict(one)))
    names = ["file", "category", "reason", "root_line", "first_failing_rank", "suspect_node", "action", "evidence"]
    assert list(table)[:8] == names
    assert table["evidence"] == [{"line": 3, "text": "KeyError: 'k'", "shows": "the cause"}]
