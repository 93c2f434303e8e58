"""Your own PyTorch loop over a graph whose features are a file: two lines differ from a loop over PyG's NeighborLoader.

python examples/disk_loop.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from espalier.graph import Graph
from espalier.mechanisms.disk_batches import PrepareOptions, prepare

torch.manual_seed(0)
folder, random = Path(tempfile.mkdtemp()), np.random.default_rng(0)
labels = random.integers(0, 4, 5000)
np.save(
    folder / "features.npy",
    random.normal(size=(5000, 32)).astype(np.float32) + 2 * np.eye(4, 32, dtype=np.float32)[labels],
)
ends = random.integers(0, 5000, (2, 20000))
graph = Graph.from_edges(*ends, features=np.zeros((5000, 0)), labels=labels, undirected=True)


class Sage(torch.nn.Module):
    """A layer of GraphSAGE with the mean of the neighbours."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.heard = torch.nn.Linear(inputs, outputs), torch.nn.Linear(inputs, outputs)

    def forward(self, x, edge_index):
        """[nodes, outputs] of x [nodes, inputs]."""
        source, target = edge_index
        sums = torch.zeros_like(x).index_add(0, target, x[source])
        count = torch.bincount(target, minlength=len(x)).clamp(min=1)
        return self.own(x) + self.heard(sums / count[:, None])


model = Sage(32, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
# loader = NeighborLoader(data, num_neighbors=[5], batch_size=256)
loader = prepare(graph, folder / "features.npy", folder / "packed", PrepareOptions((5,), 256, memory="2MiB"))
for epoch in range(5):
    for batch in loader:
        logits = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(logits, batch.y)  # of NeighborLoader: batch.y[: batch.batch_size]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
loader.close()
