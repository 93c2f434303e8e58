"""Past incidents: the one that reads alike, and none where none does or two are as near."""

from __future__ import annotations

import pytest

from espalier.ops import incidents
from espalier.ops.incidents import Incident, with_incident
from espalier.ops.taxonomy import REASONS, Diagnosis
from espalier.recipe.errors import UserError

FLUX = Incident("the flux capacitor is out of plutonium", "OS Error")
WARP = Incident("warp core breach imminent, eject now", "Node Failure")


def test_the_one_that_reads_alike_explains():
    assert incidents.explained("12:00 node 7: flux capacitor is out of plutonium (9 g)", [WARP, FLUX]) is FLUX


@pytest.mark.parametrize("text", ["", "iteration 3 loss 2.0", "the the the"])
def test_nothing_explains_what_reads_otherwise(text):
    assert incidents.explained(text, [FLUX, WARP]) is None


def test_two_reasons_as_near_explain_nothing():
    assert incidents.explained(FLUX.text, [FLUX, Incident(FLUX.text, "Key Error")]) is None
    assert incidents.explained(FLUX.text, [FLUX, Incident(FLUX.text, "OS Error")]) is not None


def test_the_nearest_come_first_and_identical_is_one():
    scored = incidents.nearest_incidents(FLUX.text, [WARP, FLUX])
    assert scored[0] == (pytest.approx(1.0), FLUX)
    assert incidents.nearest_incidents("x", []) == []


def test_they_stand_in_the_file_of_rules(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[[incident]]\ntext = 'flux'\nreason = 'OS Error'\n")
    assert incidents.read(path) == (Incident("flux", "OS Error"),)
    path.write_text("[[incident]]\ntext = 'flux'\nreason = 'OS Eror'\n")
    with pytest.raises(UserError, match="incident 1: reason = 'OS Eror'"):
        incidents.read(path)
    path.write_text("[[incident]]\nreason = 'OS Error'\n")
    with pytest.raises(UserError, match="incident 1 has no text"):
        incidents.read(path)


UNKNOWN = Diagnosis("a.log", "Other", "Unknown", 1, None, None, "retry")


@pytest.mark.parametrize("reason", REASONS)
def test_no_incident_stops_or_isolates_a_node(reason):
    found = with_incident(UNKNOWN, {1: "flux capacitor empty"}, [Incident("flux capacitor empty", reason)])
    assert found.reason == reason
    assert found.action == ("retry" if REASONS[reason].action in ("stop", "isolate") else REASONS[reason].action)


def test_without_incidents_nothing_changes():
    assert with_incident(UNKNOWN, {1: "flux"}, ()) == UNKNOWN
