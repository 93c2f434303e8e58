"""A rank gets something wrong without a word: it is noticed, named, and what came of it is taken back."""

import pytest
import torch
from struck import Struck, recipe_of, same

STEP = 5


class Flipped(Struck):
    """One bit of a parameter of `rank` is another from STEP on, in the first `times` attempts that get there."""

    def __init__(self, *arguments, rank, times=1, **options):
        super().__init__(*arguments, **options)
        self.rank, self.times = rank, times

    def _arm(self, workload, place):
        super()._arm(workload, place)
        plain = workload.loss

        def loss(model, batch):
            if model.training and place.rank == self.rank and self.trainer.step + 1 == STEP:
                self.flip(next(iter(model.parameters())), place.attempt)
            return plain(model, batch)

        workload.loss = loss

    def flip(self, parameter, attempt):
        marker = self.folder / f"flipped-{attempt}"
        if attempt < self.times and not marker.exists():
            marker.touch()
            parameter.detach().view(torch.int32).view(-1)[3] ^= 1 << 22


def flipped(corpus, folder, world, memory=1 << 26, stays="alike", **options):
    run = Flipped(recipe_of(corpus), world, folder / "run", memory=memory, stays=stays, **options).run()
    assert (run.folder / "flipped-0").exists()
    return run


@pytest.mark.extremes
@pytest.mark.parametrize(
    ("rank", "stays"),
    [(2, "alike"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, ""), (0, "alike"), (2, "")))],
)
def test_the_run_is_put_back_to_where_all_held_the_same(corpus, unbroken, tmp_path, rank, stays):
    run = flipped(corpus, tmp_path, 3, rank=rank, stays=stays)
    assert same(run, unbroken(3))
    (incident,) = run.all("incident")
    assert (incident["kind"], incident["rank"]) == ("corrupt", rank)
    assert incident["what"] == f"Rank {rank} no longer holds what the others do."
    assert (incident["reason"], incident["calls_for"]) == ("ECC Error", "isolate")
    (recovered,) = run.all("recovered")
    assert recovered["step"] < STEP


def test_of_two_ranks_none_is_blamed(corpus, unbroken, tmp_path):
    run = flipped(corpus, tmp_path, 2, rank=1)
    assert same(run, unbroken(2))
    (incident,) = run.all("incident")
    assert (incident["kind"], incident["rank"]) == ("corrupt", -1)


@pytest.mark.slow
def test_it_is_noticed_where_states_are_only_saved_on_disk(corpus, unbroken, tmp_path):
    run = flipped(corpus, tmp_path, 3, rank=1, memory=0)
    assert same(run, unbroken(3))
    assert [event["source"] for event in run.all("recovered")] == ["disk"]


@pytest.mark.slow
def test_a_rank_that_is_wrong_again_and_again_ends_the_run(corpus, tmp_path):
    with pytest.raises(Exception, match="Rank 1 no longer holds what the others do") as caught:
        flipped(corpus, tmp_path, 3, rank=1, times=9, restarts=1)
    assert caught.value.exit_code == 1
