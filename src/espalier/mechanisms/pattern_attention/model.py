"""Graph transformer: nodes are tokens, attention runs along the edges of a block or over all its nodes.

The layers of TorchGT's slim Graphormer (arXiv 2407.14106, section 4.1; Graphormer: arXiv 2106.05234): layer norm before
attention and before the feed-forward part, both added to the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor, nn

from espalier import recipe as config
from espalier.graph.networks.base import MessageBlock, MessageBlocks
from espalier.graph.networks.network import GraphNetwork
from espalier.kernels.dropout import activated
from espalier.mechanisms.pattern_attention.attention import attention
from espalier.mechanisms.pattern_attention.edge_dropping import reformed
from espalier.mechanisms.pattern_attention.encodings import hops
from espalier.mechanisms.pattern_attention.pattern import Additions, Pattern, pattern
from espalier.mechanisms.pattern_attention.schedule import Schedule

WITHOUT = 0.95
"""Share of the nodes that a training step does without the layers for, where `local` is set."""
Attend = Callable[..., Tensor]
"""(q, k, v [tokens, heads, width], pattern, *, bias, plan) -> [tokens, heads, width]: `attention`."""


class Tokens(NamedTuple):
    """What a layer attends over.

    Attributes:
        pattern: of nodes, then virtual tokens.
        kinds: what bias each entry has, uint8 [entries], of a full pattern [tokens, tokens]; None: no bias.
        graphs: small graphs side by side, each with virtual tokens of its own.
        attend: attention over ranks, where tokens are cut; None: a layer's own.
    """

    pattern: Pattern
    kinds: Tensor | None
    graphs: int
    attend: Attend | None = None


def tokens_of(block: MessageBlock, options: config.GraphTransformer, path: bool, full: bool) -> Tokens:
    """The tokens of a block and their pattern, with the block's recall; made once. Several graphs are told by the form
    `sizes` of the block."""
    name = f"tokens {full} {path} {options.virtual} {options.expander} {options.distance}"
    made: Tokens = block.forms.get(name, lambda: _tokens(block, options, path, full))
    if full or block.recall == 1:
        return made
    return block.forms.get(f"{name} {block.recall}", lambda: _fewer(made, block.recall))


def _fewer(made: Tokens, recall: float) -> Tokens:
    fewer = reformed(made.pattern, recall)
    fewer.pattern.chosen.update(made.pattern.chosen)
    return Tokens(fewer.pattern, None if made.kinds is None else made.kinds[fewer.entries], made.graphs)


def _tokens(block: MessageBlock, options: config.GraphTransformer, path: bool, full: bool) -> Tokens:
    sizes: Tensor | None = block.forms.known.get("sizes")
    nodes = block.sources
    virtual = options.virtual
    edges = torch.stack([block.indices.long(), block.rows()]).cpu()
    if full and sizes is None:
        made = Pattern.full(nodes + virtual)
    else:
        added = Additions(path=path, virtual=virtual, expander=options.expander, sizes=sizes, complete=full)
        made = pattern(edges, nodes, added)
    kinds = None if not options.distance else _kinds(made, edges, nodes, options.distance)
    return Tokens(made, kinds, 1 if sizes is None else len(sizes))


def _kinds(made: Pattern, edges: Tensor, nodes: int, most: int) -> Tensor:
    """Of each entry: its hops, most + 1 for more, most + 2 where one token is virtual."""
    ones = np.ones(edges.shape[1], np.int8)
    keys, far = hops(sparse.csr_array((ones, (edges[1].numpy(), edges[0].numpy())), shape=(nodes, nodes)), most)
    if made.matrix is None:
        dense = torch.full((made.tokens, made.tokens), most + 2, dtype=torch.uint8)
        dense[:nodes, :nodes] = most + 1
        rows = torch.from_numpy(keys // nodes)
        columns = torch.from_numpy(keys % nodes)
        dense[rows, columns] = torch.from_numpy(far)
        return dense
    rows = made.matrix.rows
    columns = made.matrix.indices.long()
    kinds = torch.full((made.entries,), most + 2, dtype=torch.uint8)
    real = torch.nonzero((rows < nodes) & (columns < nodes)).flatten()
    asked = (rows * nodes + columns)[real].numpy()
    at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    kinds[real] = torch.from_numpy(np.where(keys[at] == asked, far[at], most + 1).astype(np.uint8))
    return kinds


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). `attend` is the seam.

    The projection of the heads' outputs begins as the identity. As nn.Linear begins, it would make what attention adds
    smaller by sqrt(3) once more, and WordNet is learnt more slowly (docs/measured/graph-transformers.md).
    """

    def __init__(self, options: config.GraphTransformer) -> None:
        super().__init__()
        width = options.width or 0
        inner = options.feed_forward or 0
        self.heads = options.heads or 1
        self.dropout = options.dropout or 0.0
        self.attention_norm = _norm(options)
        self.feed_forward_norm = _norm(options)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        nn.init.eye_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.bias = nn.Parameter(torch.zeros(options.distance + 3, self.heads)) if options.distance else None
        self.gates = nn.Parameter(torch.zeros(2, width)) if options.local else None
        self.attend: Attend = attention

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """[tokens, width] -> the same."""
        share = self.dropout if self.training else 0.0
        q, k, v = rebuilt(self.attention_norm, x, self.qkv).view(len(x), 3, self.heads, -1).unbind(1)
        if tokens.pattern.matrix is not None and q.dtype not in (torch.float32, torch.float64):
            q = q.float()
            k = k.float()
            v = v.float()
        attend = tokens.attend or self.attend
        attended = attend(q, k, v, tokens.pattern, bias=self._bias(tokens, q.dtype), plan="auto")
        x = x + self._gated(0, activated(self.out(attended.flatten(1)), "none", share))
        inner = rebuilt(self.feed_forward_norm, x, self.up)
        down = self.down(activated(F.gelu(inner), "none", share)) if share else rebuilt(F.gelu, inner, self.down)
        return x + self._gated(1, activated(down, "none", share))

    def _gated(self, part: int, x: Tensor) -> Tensor:
        return x if self.gates is None else self.gates[part] * x

    def _bias(self, tokens: Tokens, dtype: torch.dtype) -> Tensor | None:
        if self.bias is None or tokens.kinds is None:
            return None
        bias = self.bias[tokens.kinds.to(self.bias.device).int()].to(dtype)
        return bias if tokens.pattern.matrix is not None else bias.permute(2, 0, 1)


def rebuilt(make: Callable[[Tensor], Tensor], x: Tensor, use: Callable[[Tensor], Tensor]) -> Tensor:
    """`use(make(x))`, whose backward pass computes `make(x)` again: the same bits, which are not kept meanwhile."""
    made = make(x)
    if made is x:
        return use(x)
    place, layout = made.data_ptr(), (made.shape, made.stride())

    def pack(tensor: Tensor) -> Tensor | None:
        return None if tensor.data_ptr() == place and (tensor.shape, tensor.stride()) == layout else tensor

    def unpack(packed: Tensor | None) -> Tensor:
        with torch.no_grad():
            return make(x) if packed is None else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return use(made)


def _norm(options: config.GraphTransformer) -> nn.Module:
    return nn.Identity() if options.local else nn.LayerNorm(options.width or 0)


class GraphTransformer(GraphNetwork):
    """Features [nodes, inputs] to outputs [nodes, outputs], over the tokens of a block.

    With `local`, features are averages over neighbours (`encodings.averaged`) and the model begins as a linear map of
    them (Zhu and Koniusz, ICLR 2021): layers have gates that begin at 0 (arXiv 2003.04887) and no norms, so that weight
    decay bounds them as it does GCN, and most nodes of a training step do without the layers (arXiv 1603.09382), so
    that the linear map alone has to answer, and the layers learn what it leaves.

    With a `schedule` that has full steps as well as others, answers (not in training) are the mean of both attentions'.
    """

    def __init__(self, options: config.GraphTransformer, inputs: int, outputs: int) -> None:
        super().__init__()
        self.options = options
        width = options.width or 0
        self.embed = nn.Linear(inputs, width)
        self.head = nn.Linear(width, outputs)
        self.virtual = nn.Parameter(torch.randn(options.virtual, width) * 0.02)
        self.layers = nn.ModuleList(TransformerLayer(options) for _ in range(options.depth or 0))
        self.norm = _norm(options)
        self.schedule = Schedule(0, options.path)

    def answers(self, features: Tensor, blocks: MessageBlocks) -> Tensor:
        """Along the edges of the first block."""
        rows: Tensor = self(features, blocks[0])
        return rows[: blocks[-1].targets]

    def forward(self, features: Tensor, block: MessageBlock) -> Tensor:
        """[sources of the block, inputs] -> [sources, outputs]; in training attention is full where the block is. Of
        tokens that are cut over ranks, those of this one; all ranks call it alike."""
        if self.training or self.schedule.every < 2:
            return self.run(features, block, block.full or (not self.training and self.schedule.every == 1))
        return (self.run(features, block, False) + self.run(features, block, True)) / 2

    def run(self, features: Tensor, block: MessageBlock, full: bool) -> Tensor:
        """Under one of the two attentions."""
        tokens = tokens_of(block, self.options, self.schedule.path, full)
        share = (self.options.dropout or 0.0) if self.training else 0.0
        x = activated(self.embed(features), "none", share)
        cut = block.tokens
        embedded = x
        virtual: Tensor = self.virtual
        if cut is not None:
            tokens = tokens._replace(attend=cut.attend)
            virtual = virtual if cut.last else virtual[:0]
        if len(self.virtual):  # an empty share of them too, so that every parameter has a gradient
            x = torch.cat([x, torch.repeat_interleave(virtual, tokens.graphs, 0).to(x.dtype)])
        for layer in self.layers:
            x = layer(x, tokens)
        x = x[: len(features)]
        if self.options.local and self.training and share:
            x = embedded + F.dropout(torch.ones_like(x[:, :1]), WITHOUT) * (x - embedded)
        return self.head(self.norm(x))

    def work(self, nodes: Any, entries: Any, pairs: Any) -> tuple[list[tuple[Any, int, int]], Any, Any, Any]:
        """Products (rows, inner, columns), FLOPs of full attention, bytes moved and kept, all in one forward pass over
        `nodes` tokens, by `entries` of the pattern or, in full steps, by `pairs`."""
        options = self.options
        width, inner, depth, heads = (
            x or 0 for x in (options.width, options.feed_forward, options.depth, options.heads)
        )
        layer = [(nodes, width, 3 * width), (nodes, width, width), (nodes, width, inner), (nodes, inner, width)]
        inputs = self.embed.in_features
        outputs = self.head.out_features
        products = [(nodes, inputs, width), *layer * depth, (nodes, width, outputs)]
        flops = 4.0 * pairs * width * depth * self.schedule.share
        moved = depth * 4.0 * ((1 - self.schedule.share) * entries * 2 * (width + heads) + nodes * 12 * width)
        saved = 4.0 * nodes * (inputs + depth * (8 * width + 2 * inner))
        return products, flops, moved, saved
