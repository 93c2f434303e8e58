"""The networks of bench/torchgt.py that are not ours: dense attention, and PyG's graph transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEPTH, WIDTH, HEADS = 4, 64, 8


class Block(nn.Module):
    """A layer norm, some attention, a layer norm, a feed-forward part: as our layers, around anybody's attention."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x), edges)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module], inputs: int, outputs: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, outputs)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        found = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return self.out(found.transpose(0, 1).flatten(1))


class Nothing(nn.Module):
    """In place of attention: what is left is a multilayer perceptron."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.zeros_like(x)


def peer(name: str, inputs: int, outputs: int, depth: int = DEPTH, width: int = WIDTH) -> nn.Module:
    if name in ("dense", "MLP"):
        made = Dense if name == "dense" else Nothing
        return Stack([Block(made()) for _ in range(depth)], inputs, outputs)
    from torch_geometric.nn import GPSConv, TransformerConv
    from torch_geometric.nn.models import Polynormer, SGFormer

    if name == "TransformerConv":
        layers = [Block(TransformerConv(WIDTH, WIDTH // HEADS, heads=HEADS)) for _ in range(depth)]
        return Stack(layers, inputs, outputs)
    if name.startswith("GPSConv"):
        kind = name.partition(" ")[2]
        size = {"head_channels": WIDTH // HEADS} if kind == "performer" else {}  # PyG's own are 64 columns each
        made = [GPSConv(WIDTH, None, heads=HEADS, attn_type=kind, attn_kwargs=size) for _ in range(depth)]
        return Stack(made, inputs, outputs)
    if name == "SGFormer":  # with the one head that is its default
        return Batched(SGFormer(inputs, width, outputs, gnn_num_layers=depth))
    return Batched(
        Polynormer(inputs, width, outputs, local_layers=depth, global_layers=1)
    )  # PyG's fails with more heads


class Batched(nn.Module):
    """A network that asks which graph each node belongs to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.model(x, edges, torch.zeros(len(x), dtype=torch.int64))
