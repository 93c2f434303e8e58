"""A loop of your own whose parameters and AdamW are on an optimizer node: a few lines more than without.

    python examples/optimizer_node.py state        # again: it goes on where it stood

The node runs in this process here; on a machine of its own it is the lines up to `node.wait()`.
"""

import sys

import torch
from torch import nn

from espalier.mechanisms import optimizer_node as luwu

torch.manual_seed(1)
blocks = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
model = nn.Sequential(nn.Linear(32, 64), *blocks, nn.Linear(64, 1))
matrices = [one for one in model.parameters() if one.ndim > 1]
vectors = [one for one in model.parameters() if one.ndim < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

job = luwu.job_of(model, optimizer)
node = luwu.start_node(sys.argv[1], job, model, "a secret of your own", ("127.0.0.1", 0))
client = luwu.Client([[node.door.getsockname()]], 0, job, "a secret of your own")
loop = luwu.attach(model, optimizer, client)

step, end = client.step, client.step + 20
while step < end:
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    try:
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except luwu.StepLost:  # the node has started again, and needs that step once more
        step = loop.recover()
        continue
    step += 1
    print(f"step {step}: loss {loss.item():.6f}, {loop.window.held} bytes of parameters here")

loop.close()
node.close()
