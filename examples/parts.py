"""Three parts of Espalier by themselves: a process group that counts bytes, sharded states, and checkpoints.

torchrun --nproc-per-node 2 examples/parts.py
"""

import torch
import torch.distributed as dist

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.comm import connect, disconnect
from espalier.mechanisms.sharding.amsp import Amsp
from espalier.optim import adamw
from espalier.plan.axes.placement import ShardFactors
from espalier.plan.axes.placement_plan import Spread
from espalier.recipe import Adamw

store, rank, world = next(iter(dist.rendezvous("env://")))
channel = connect(store, rank, world, timeout=60)  # a wait that lasts longer names the rank that is missing
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 99), torch.nn.Tanh(), torch.nn.Linear(99, 1))
sharding = Amsp(model, channel, Spread(factors=[("*", ShardFactors(1, 1, world))]))  # parameters, gradients, states
optimizer = adamw.build(Adamw(learning_rate=1e-2), sharding.owned)

inputs = torch.randn(64, 20)[rank::world]
for _ in range(50):
    sharding.clear()
    with sharding.accumulate(last=True):
        loss = (model(inputs) - inputs.sin().sum(1, keepdim=True)).square().mean() / world
        loss.backward()
    sharding.finish()
    optimizer.step(1.0)
    sharding.refresh()

group = dist.new_group(backend="gloo")
saved = Checkpoints("parts", group=group)
saved.save(50, sharding.parts(optimizer), {"step": 50}, wait=True)
again = saved.load(sharding.parts(optimizer))
if rank == 0:
    sent = sum(channel.ledger.bytes.values())
    print(f"loss {loss.item():.4f}, step {again.meta['step']} restored, {sent:,.0f} bytes sent")
saved.wait()
del saved, group
disconnect()
