import torch

from espalier.checkpoint import shared_memory
from espalier.checkpoint.in_memory import CopySlot


def test_what_is_cleared_holds_no_copy_and_takes_new_ones():
    refuges = shared_memory.build(2, 1 << 20)
    try:
        for one in refuges:
            CopySlot(one.files[0]).write(7, {"a": torch.arange(3.0)}, "rest")
            assert CopySlot(one.files[0]).good()
        shared_memory.clear(refuges[:1])
        assert (CopySlot(refuges[0].files[0]).step, CopySlot(refuges[1].files[0]).step) == (-1, 7)
        assert not CopySlot(refuges[0].files[0]).good()
        CopySlot(refuges[0].files[0]).write(8, {"a": torch.arange(3.0)}, "rest")
        assert CopySlot(refuges[0].files[0]).good()
    finally:
        shared_memory.release(refuges)
