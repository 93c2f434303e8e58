import pytest

from espalier.recipe.errors import UserError
from espalier.train import version_check


def ranks(**changes):
    usual = {"host": "a", "python": "3.11", "torch": "2.13.0", "recipe": "r", "data": "d"}
    found = [dict(usual, host=f"host{rank}") for rank in range(4)]
    for key, value in changes.items():
        found[2][key] = value
    return found


def test_equal_ranks_pass_whatever_their_host():
    version_check.check(ranks())


@pytest.mark.parametrize("key", ["python", "torch", "recipe", "data"])
def test_the_odd_rank_is_named_with_its_host_and_value(key):
    with pytest.raises(UserError, match=rf"do not agree on {key}: rank 2 on host2 has other; 3 of 4"):
        version_check.check(ranks(**{key: "other"}))


def test_identity_holds_versions_and_hashes():
    own = version_check.identity(data="x")
    assert own["data"] == "x"
    assert {"host", "python", "torch"} <= set(own)
