import torch

from espalier.checkpoint import refuge
from espalier.checkpoint.memory import Slot


def test_what_is_cleared_holds_no_copy_and_takes_new_ones():
    refuges = refuge.build(2, 1 << 20)
    try:
        for one in refuges:
            Slot(one.files[0]).write(7, {"a": torch.arange(3.0)}, "rest")
            assert Slot(one.files[0]).good()
        refuge.clear(refuges[:1])
        assert (Slot(refuges[0].files[0]).step, Slot(refuges[1].files[0]).step) == (-1, 7)
        assert not Slot(refuges[0].files[0]).good()
        Slot(refuges[0].files[0]).write(8, {"a": torch.arange(3.0)}, "rest")
        assert Slot(refuges[0].files[0]).good()
    finally:
        refuge.release(refuges)
