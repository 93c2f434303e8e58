"""What tests of this folder share."""

import pytest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Nine short texts of sums."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(9):
        (folder / f"{number}.txt").write_text("".join(f"{number} plus {i} is {number + i}\n" for i in range(80)))
    return folder
