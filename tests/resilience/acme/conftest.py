"""Workers of these tests keep the priority of the tests: beside busy ones the lowest there is would wait for ever."""

from __future__ import annotations

import pytest

from espalier.resilience.acme import background


@pytest.fixture(autouse=True, scope="module")
def priority():
    kept = background.step_back, background._lower_session
    background.step_back = background._lower_session = lambda *_: None
    yield kept
    background.step_back, background._lower_session = kept
