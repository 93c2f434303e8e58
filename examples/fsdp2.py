"""torchrun --nproc-per-node 2 examples/fsdp2.py: FSDP2 with gradients as 8-bit blocks and parameters as bfloat16."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from espalier.comm.fsdp import compress

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
fully_shard(model)
compress(model, gradients="int8", parameters="bf16")
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(100):
    x = torch.randn(32, 64)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 33 == 0 and dist.get_rank() == 0:
        print(f"step {step}, loss {loss.item():.3f}")
dist.destroy_process_group()
