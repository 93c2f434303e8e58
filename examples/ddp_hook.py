"""torchrun --nproc-per-node 2 examples/ddp_hook.py: DistributedDataParallel whose gradients cross as 8-bit blocks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import espalier.comm

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
wrapped = DistributedDataParallel(model)
hook = espalier.comm.ddp_hook("int8")
wrapped.register_comm_hook(None, hook)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(100):
    x = torch.randn(32, 64)
    loss = (wrapped(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 33 == 0 and dist.get_rank() == 0:
        print(f"step {step}, loss {loss.item():.3f}")
raw = 100 * sum(parameter.nbytes for parameter in model.parameters())
if dist.get_rank() == 0:
    print(f"sent {hook.sent / raw:.2f} of the bytes that two ranks would send")
dist.destroy_process_group()
