"""What libraries are told before torch is imported; what the user has set stays."""

from __future__ import annotations

import os

import pytest

from espalier.cli import main as cli
from espalier.recipe import process_environment


@pytest.mark.parametrize(
    ("name", "value"), [process_environment.QUIET, process_environment.SPINS, process_environment.ALLOCATOR]
)
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


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_how_memory_of_a_gpu_is_allocated_is_the_users_word_where_there_is_one_and_runs_say_it(monkeypatch, name):
    for other in (process_environment.ALLOCATOR[0], process_environment.OLDER):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    process_environment.settle()
    assert process_environment.allocation("cuda:0") == {"allocator": "max_split_size_mb:64"}
    assert [os.environ.get(other) for other in (process_environment.ALLOCATOR[0], process_environment.OLDER)].count(
        "max_split_size_mb:64"
    ) == 1
    monkeypatch.delenv(name)
    process_environment.settle()
    assert process_environment.allocation("cuda:0") == {"allocator": "expandable_segments:True"}
    assert process_environment.allocation("cpu") == {}
