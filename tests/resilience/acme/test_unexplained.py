"""What is only likely never stops a job."""

from __future__ import annotations

import pytest

from espalier.resilience.acme.diagnose import Means
from espalier.resilience.acme.incidents import Incident
from espalier.resilience.acme.taxonomy import ACTIONS, REASONS, Diagnosis
from espalier.resilience.acme.unexplained import beyond_rules, never_stop

UNKNOWN = Diagnosis("a.log", "Other", "Unknown", 1, None, None, "retry")


@pytest.mark.parametrize("action", ACTIONS)
def test_a_stop_becomes_a_retry_and_the_rest_stays(action):
    assert never_stop(action) == ("retry" if action == "stop" else action)


@pytest.mark.parametrize("reason", REASONS)
def test_no_incident_stops(reason):
    found = beyond_rules(
        UNKNOWN, {1: "flux capacitor empty"}, Means(incidents=(Incident("flux capacitor empty", reason),))
    )
    assert found.reason == reason
    assert found.action != "stop"


def test_without_incidents_and_model_nothing_changes():
    assert beyond_rules(UNKNOWN, {1: "flux"}, Means()) == UNKNOWN
