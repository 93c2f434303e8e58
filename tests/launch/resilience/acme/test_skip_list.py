import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.recipe.errors import UserError
from espalier.train import skip_list
from espalier.train.skip_list import Skips


@given(st.sets(st.integers(0, 60), max_size=30))
def test_every_batch_that_is_not_left_out_is_taken_once_and_in_order(left_out):
    skips = Skips(tuple(sorted(left_out)))
    taken = [skips.batch(step) for step in range(60)]
    expected = [number for number in range(200) if number not in left_out][:60]
    assert taken == expected


def test_what_was_already_left_out_stays_so_and_new_steps_are_counted_in_batches():
    first = Skips().without(11, 15)
    assert first.batches == (10, 11, 12, 13, 14)
    assert first.back_to == 10
    second = first.settled().without(11, 12)
    assert second.batches == (10, 11, 12, 13, 14, 15, 16)
    assert second.settled().back_to is None


def test_a_batch_is_left_out_the_second_time_only():
    once = Skips().suspecting(7)
    assert (once.suspects, once.batches) == ((7,), ())
    assert once.suspecting(7).batches == (7,)
    assert once.suspecting(8).batches == ()


def test_the_list_is_kept_in_the_folder(tmp_path):
    assert skip_list.read(tmp_path) == Skips()
    skips = Skips((3, 4), (9,), 2)
    skip_list.write(tmp_path, skips)
    assert skip_list.read(tmp_path) == skips
    (tmp_path / skip_list.NAME).write_text("{")
    with pytest.raises(UserError, match=r"skips\.json cannot be read"):
        skip_list.read(tmp_path)
