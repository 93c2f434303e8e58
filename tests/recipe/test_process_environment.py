"""What libraries are told before torch is imported; what the user has set stays."""

from __future__ import annotations

import os

import pytest

from espalier.cli import main as cli
from espalier.recipe import process_environment


@pytest.mark.parametrize(("name", "value"), [process_environment.QUIET, process_environment.SPINS])
def test_the_command_line_sets_what_the_user_has_not(monkeypatch, name, value):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv(name, "7")
    assert cli.main(["explain"]) == 0
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    assert cli.main(["explain"]) == 0
    assert os.environ[name] == value


def test_a_policy_of_the_user_decides_how_threads_wait(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.delenv(process_environment.SPINS[0], raising=False)
    process_environment.settle()
    assert process_environment.SPINS[0] not in os.environ
