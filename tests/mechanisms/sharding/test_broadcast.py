"""Running statistics are rank 0's on all ranks after every step; what does not move is not sent."""

import pytest
import torch
from torch import nn

from espalier.comm.base import Traffic
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.mechanisms.sharding.broadcast import BufferSync
from many_ranks import forks


class Net(nn.Module):
    """With statistics that move, a table that is saved and stays, and a cache that is not saved."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.register_buffer("table", torch.arange(4000.0))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.cache += x.mean()
        return self.norm(self.linear(x))


def stepped(channel, steps, sampleless=()):
    net = Net()
    running = BufferSync(net, channel)
    alone = Net()
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + channel.rank())
        x = torch.randn(8, 6, generator=generator)
        if channel.rank() not in sampleless:
            net(x)
        if channel.rank() == 0:
            alone(x)
        running.spread()
    sent = sum(count for (kind, _), count in channel.ledger.bytes.items() if kind == Traffic.PARAMETERS.value)
    return {name: value.clone() for name, value in net.named_buffers()}, dict(alone.named_buffers()), sent


@pytest.mark.parametrize("sampleless", [(), (1,)])
def test_all_ranks_have_what_rank_0_alone_would_have(sampleless):
    torch.set_num_threads(1)
    found = forks(3, stepped, 4, sampleless)
    alone = found[0][1]
    for buffers, _, _ in found:
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "table"):
            assert torch.equal(buffers[name], alone[name]), name
    assert found[0][2] == 4 * (5 * 4 + 5 * 4 + 8), "the table stays where it is"
    assert len({tuple(buffers["cache"].tolist()) for buffers, *_ in found}) == 3, "that is each rank's own"


def trained(channel):
    """Forward passes of two ranks on other data, under the product's own data parallel."""
    net = Net()
    sharding = Amsp(net, channel)
    net(torch.randn(8, 6, generator=torch.Generator().manual_seed(channel.rank())))
    sharding.refresh()
    mean = net.norm.running_mean.clone()
    sharding.detach()
    return mean


def test_data_parallel_training_does_it_after_every_step():
    torch.set_num_threads(1)
    one, other = forks(2, trained)
    assert torch.equal(one, other)
    assert one.abs().sum() > 0
