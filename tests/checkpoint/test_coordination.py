"""Many ranks: sharded state is whole again at any number of them, and an error on one is an error on all."""

from __future__ import annotations

import resource
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parts import Box, forked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.recipe.errors import EspalierError, RunFailed, UserError


def own_group(timeout: float = 20.0) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """DTensor used once before the first fork: its imports then are paid for once."""
    folder = tmp_path_factory.mktemp("warm")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    dist.destroy_process_group()


WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def sharded(scale: float) -> Box:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return Box(
        rows=distribute_tensor(WHOLE * scale, mesh, [Shard(0)]),
        columns=distribute_tensor(WHOLE * scale, mesh, [Shard(1)]),
        all=distribute_tensor(WHOLE * scale, mesh, [Replicate()]),
        plain=WHOLE * scale,
        count=3,
    )


@pytest.mark.extremes
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 1), (1, 4), (2, 2)])
def test_sharded_state_is_whole_again_at_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    def save(rank: int) -> None:
        parts = {"box": sharded(1.0), f"own-{rank}": Box(rank=rank)}
        Checkpoints(tmp_path / "run", group=own_group()).save(5, parts, {"n": 5}, wait=True)

    def load(rank: int) -> None:
        box, own = sharded(0.0), Box()
        loaded = Checkpoints(tmp_path / "run", group=own_group()).load({"box": box, f"own-{rank}": own})
        assert loaded is not None
        assert (loaded.step, loaded.meta) == (5, {"n": 5})
        for name in ("rows", "columns", "all"):
            assert isinstance(box.state[name], DTensor)
            assert torch.equal(box.state[name].full_tensor(), WHOLE)
        assert torch.equal(box.state["plain"], WHOLE)
        assert own.state == ({"rank": rank} if rank < before else {})
        assert loaded.absent == ([] if rank < before else [f"own-{rank}"])

    forked(before, save)
    forked(after, load)


def test_replicated_tensors_are_written_once_and_shared_among_the_ranks(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        box = Box(**{f"w{index}": torch.full((50_000,), index) for index in range(4)})
        checkpoints = Checkpoints(tmp_path / "run", group=own_group())
        checkpoints.save(1, {"box": box}, {}, wait=True)
        (entry,) = checkpoints.entries()
        assert 4 * 50_000 * 8 <= entry.bytes < 1.1 * 4 * 50_000 * 8

    forked(2, work)
    sizes = [path.stat().st_size for path in (tmp_path / "run").glob("*/*.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0.9 * max(sizes)


def test_all_ranks_skip_the_same_damaged_checkpoint(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        checkpoints = Checkpoints(tmp_path / "run", group=own_group())
        for step in (1, 2):
            checkpoints.save(step, {"box": sharded(step)}, {}, wait=True)
        if rank == 0:
            file = tmp_path / "run" / "step-00000002" / "__1_0.distcp"
            file.write_bytes(file.read_bytes()[:-1] + b"!")
        dist.barrier()
        box = sharded(0.0)
        loaded = checkpoints.load({"box": box})
        assert loaded is not None
        assert loaded.step == 1
        assert torch.equal(box.state["rows"].full_tensor(), WHOLE)

    forked(2, work)


def test_an_error_on_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        checkpoints = Checkpoints(tmp_path / "run", group=own_group())
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
        box = Box(**{f"w{index}": torch.ones(50_000) for index in range(4)})
        with pytest.raises(UserError, match="disk is full"):
            checkpoints.save(1, {"box": box}, {}, wait=True)
        dist.barrier()
        assert list((tmp_path / "run").iterdir()) == []

    forked(2, work)


def test_a_dead_rank_is_an_error_after_the_groups_timeout(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        checkpoints = Checkpoints(tmp_path / "run", group=own_group(1.0))
        if rank == 0:
            checkpoints.save(1, {"box": Box(x=1)}, {})
            with pytest.raises(EspalierError, match="was not written") as caught:
                checkpoints.wait()
            assert isinstance(caught.value, RunFailed)
        else:
            time.sleep(2.5)

    forked(2, work)
