"""Your own loop over two ranks, optimizer states in shards.

espalier probe --out cluster.toml && torchrun --nproc-per-node 2 examples/loop.py
"""

import os

import torch

import espalier

torch.manual_seed(0)
inputs = torch.randn(256, 20)
targets = inputs.sin().sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(20, 99), torch.nn.Tanh(), torch.nn.Linear(99, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

plan = espalier.make_plan(model, "cluster.toml", batch=64, ranks=2, shard={"optimizer": 2})
model, optimizer = espalier.apply(plan, model, optimizer)

rank = int(os.environ["RANK"])
start, stop = plan.ranks[rank].share  # this rank's samples of each batch of 64
for step in range(100):
    first = step * 64 % 256
    loss = (model(inputs[first + start : first + stop]) - targets[first + start : first + stop]).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

state = model.state_dict()  # whole on every rank, so every rank asks
if rank == 0:
    torch.save(state, "model.pt")
    print(f"loss {loss.item():.4f}")
