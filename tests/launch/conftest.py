"""What struck runs are compared with: the same corpus for all of them, and the runs that nothing happens to."""

import pytest
from struck import Struck, recipe_of, write_corpus

from store_process import served


@pytest.fixture
def port():
    """Where a store is served for as long as the test takes."""
    with served() as port:
        yield port


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("struck") / "corpus")


@pytest.fixture(scope="session")
def unbroken(corpus, tmp_path_factory):
    """The run that nothing happens to, by number of ranks."""
    made = {}

    def run(world):
        if world not in made:
            made[world] = Struck(recipe_of(corpus), world, tmp_path_factory.mktemp("whole") / "run").run()
        return made[world]

    return run
