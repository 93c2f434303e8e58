"""The loop that a user would write instead: the same decoder in plain PyTorch, the same batches, one process.

    python bench/plain_loop.py REQUEST.json

Reads the request of bench/language.py (sizes, batches, threads), prints seconds per step and peak memory as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.size, kv = width // heads, width // heads * kv_heads
        self.first, self.second = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.q, self.k, self.v = (nn.Linear(width, out, bias=False) for out in (width, kv, kv))
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(inner, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], -1) * sin for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        width, vocabulary = sizes["width"], sizes["vocabulary"]
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width, 1e-5)
        shape = (width, sizes["heads"], sizes["kv_heads"], sizes["feed_forward"])
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(sizes["depth"]))
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if sizes["tied"]:
            self.head.weight = self.embedding.weight
        size = width // sizes["heads"]
        angles = torch.outer(torch.arange(sizes["sequence"]), 1e4 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stream(tokens))

    def stream(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.norm(x)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), targets, reduction="sum")


def chunked_loss(model: Decoder, tokens: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """The mean loss; logits of `chunk` tokens are there at a time, and computed again in backward."""
    x = model.stream(tokens).flatten(0, 1)
    parts = zip(x.split(chunk), targets.flatten().split(chunk), strict=True)
    return sum(checkpoint(model.loss, *part, use_reentrant=False) for part in parts) / len(x)


def train(request: dict[str, Any]) -> tuple[list[float], int]:
    """Seconds of each step, and the parameters trained."""
    torch.set_num_threads(request["threads"])
    device = torch.device(request.get("device", "cpu"))
    rows = torch.load(request["data"], weights_only=True)
    model = Decoder(request["sizes"]).to(device)
    run = torch.compile(model) if request.get("compiled") else model
    optimizer = torch.optim.AdamW(model.parameters(), request["learning_rate"], weight_decay=0.1, fused=True)
    seconds = []
    for batch in rows.split(request["batch"]):
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for part in batch.to(device).split(request["micro_batch"]):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
                if chunk := request.get("chunk", 0):
                    loss = chunked_loss(model, part[:, :-1], part[:, 1:], chunk)
                else:
                    loss = F.cross_entropy(run(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            (loss * len(part) / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()  # a loop that logs its loss
        seconds.append(time.perf_counter() - begun)
    return seconds, sum(one.numel() for one in model.parameters())


if __name__ == "__main__":
    from espalier.machine.peak_memory import peak_memory

    request = json.loads(Path(sys.argv[1]).read_text())
    seconds, parameters = train(request)
    memory = peak_memory(torch.device(request.get("device", "cpu")))
    print(json.dumps({"seconds": seconds, "memory": memory, "parameters": parameters}))
