"""Every option of the product: one tree of frozen structs. Imports no torch.

A field that defaults to None is *derived*: `config.derive` fills it in and says why. A choice is a tagged union on
`kind`, so the options of what you did not choose do not exist.
"""

from __future__ import annotations

from typing import Literal

from msgspec import field

from espalier.config.base import Choice as Choice
from espalier.config.base import Options as Options
from espalier.config.faults import Faults as Faults

Precision = Literal["fp32", "bf16", "fp64"]
Recompute = Literal["none", "selective", "block"]


# --- [model] -----------------------------------------------------------------------------------------------------


class Decoder(Choice, frozen=True):
    """What the language decoders share. Give `depth`, or `shape`, or the numbers themselves."""

    depth: int | None = None
    shape: str | None = None
    width: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    feed_forward: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    tied: bool | None = None
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    initial: str | None = None


class Gpt(Decoder, frozen=True, tag="gpt"):
    """A dense decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU)."""


class Moe(Decoder, frozen=True, tag="moe"):
    """The same decoder with a mixture of experts in place of each feed-forward block."""

    experts: int = 8
    active: int = 2
    balance: float = 0.01


class Module(Choice, frozen=True, tag="module"):
    """Anybody's `nn.Module`: `build = "package.module:function"` returns (model, dataset, loss)."""

    build: str
    arguments: dict[str, bool | int | float | str] = field(default_factory=dict)


class Network(Choice, frozen=True):
    """What the graph networks share: `depth` layers of message passing, from features to classes.

    `width` columns between layers; `activation = "maxk"` keeps the `k` largest of them in each row (MaxK-GNN).
    """

    depth: int | None = None
    width: int | None = None
    activation: Literal["relu", "elu", "maxk"] | None = None
    k: int | None = None
    dropout: float | None = None
    norm: bool = False


class Gcn(Network, frozen=True, tag="gcn"):
    """Graph convolution with symmetric normalisation (arXiv 1609.02907)."""


class Sage(Network, frozen=True, tag="sage"):
    """GraphSAGE with the mean of the neighbours (arXiv 1706.02216)."""


class Gat(Network, frozen=True, tag="gat"):
    """Graph attention (arXiv 1710.10903); `heads` share the width."""

    heads: int = 8


class Gin(Network, frozen=True, tag="gin"):
    """Graph isomorphism network (arXiv 1810.00826): sums and two-layer perceptrons."""


class Messages(Choice, frozen=True, tag="messages"):
    """Anybody's PyG network: `build = "package.module:function"` is called with (features, classes, **arguments)."""

    build: str
    arguments: dict[str, bool | int | float | str] = field(default_factory=dict)


GRAPH = (Network, Messages)
"""The kinds of model that are trained on a graph."""

Model = Gpt | Moe | Module | Gcn | Sage | Gat | Gin | Messages


# --- [graph] -----------------------------------------------------------------------------------------------------


class Graph(Options, frozen=True):
    """What is asked of a graph, and how it is read.

    `fanout` neighbours are drawn at each layer, the one next to the targets first (-1: all of them); empty trains on
    the whole graph. `split` are the shares of training, validation and test where the data brings none.
    `inductive` hides held-out nodes while training; `undirected` lets messages flow both ways along each edge;
    `negatives` are drawn for each true link; `pickle` allows files whose loading may run code.
    """

    task: Literal["node", "link", "graph"] = "node"
    fanout: tuple[int, ...] = ()
    split: tuple[float, float, float] = (0.6, 0.2, 0.2)
    inductive: bool = False
    undirected: bool = True
    negatives: int = 1
    pickle: bool = False
    order: Literal["auto", "none", "rcmpp", "clusters"] = "auto"
    format: Literal["auto", "csr", "cbm"] = "auto"


# --- [data] ------------------------------------------------------------------------------------------------------


class Data(Options, frozen=True):
    """One source of training data; several `[[data]]` tables make a weighted mixture."""

    path: str
    weight: float = 1.0
    field: str = "text"
    split: str = "train"
    tokenizer: str = "bytes"
    validation: float = 0.01
    cache: str | None = None


# --- [train] -----------------------------------------------------------------------------------------------------


class Adamw(Choice, frozen=True, tag="adamw"):
    """AdamW (fused) on every parameter; `coupled`: Adam, the decay a part of the gradient (L2)."""

    learning_rate: float | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    coupled: bool = False


class Muon(Choice, frozen=True, tag="muon"):
    """Muon on the hidden matrices, AdamW on embeddings, norms and the head."""

    learning_rate: float | None = None
    momentum: float = 0.95
    weight_decay: float = 0.1
    iterations: int = 5
    adamw: Adamw = Adamw(weight_decay=0.0)


class Stable(Choice, frozen=True, tag="stable"):
    """Warmup, stable, decay (WSD): linear up, constant, linear down to `floor`. Shares of all steps."""

    warmup: float = 0.02
    decay: float = 0.4
    floor: float = 0.0


class Cosine(Choice, frozen=True, tag="cosine"):
    """Linear warmup, then half a cosine down to `floor`. Shares of all steps."""

    warmup: float = 0.02
    floor: float = 0.1


class Constant(Choice, frozen=True, tag="constant"):
    """The same rate at every step."""


class Train(Options, frozen=True):
    """How long, with what batch, at which precision."""

    steps: int | None = None
    sequence: int | None = None
    batch_tokens: int | None = None
    seed: int = 1
    precision: Precision = "fp32"
    compile: bool = False
    recompute: Recompute | None = None
    optimizer: Muon | Adamw = Muon()
    schedule: Stable | Cosine | Constant = Stable()
    clip: float = 1.0
    validate_every: int | None = None
    validate_tokens: int = 65_536


# --- [plan] ------------------------------------------------------------------------------------------------------


class Shard(Options, frozen=True):
    """Over how many ranks each state is split; None leaves it to the planner."""

    params: int | None = None
    grads: int | None = None
    optimizer: int | None = None


class Pin(Options, frozen=True):
    """Decisions taken out of the planner's hands: the names of a plan's `layout`, and how ranks are made."""

    ranks: int | None = None
    threads: int | None = None
    dp: int | None = None
    tp: int | None = None
    sp: int | None = None
    pp: int | None = None
    algorithm: Literal["data", "megatron", "fsp", "isp"] | None = None
    shard: Shard | None = None
    micro_batch: int | None = None
    accumulate: int | None = None
    recompute: Recompute | None = None


class Planning(Options, frozen=True):
    """Where the plan comes from, and what it must obey.

    `memory`: bytes a rank may hold ("60GiB"); `redundancy`: ranks that hold each shard of the optimizer's state;
    `max_devices`: devices to use at most; `calibration`: measured runs (a file, or a run's folder) to learn from.
    """

    cluster: str | None = None
    trial: bool = True
    memory: str | int | None = None
    redundancy: int = 1
    max_devices: int | None = None
    calibration: str | None = None
    pin: Pin = Pin()


# --- the rest ----------------------------------------------------------------------------------------------------


class Checkpoint(Options, frozen=True):
    """When the state is saved, and where. `target` is a folder or any fsspec URL.

    `every`: steps, or `"auto"`: from what saves are measured to cost and how often something fails.
    """

    every: int | Literal["auto"] = "auto"
    keep: int = 2
    keep_best: bool = True
    target: str | None = None


class Comm(Options, frozen=True):
    """What every exchange obeys.

    `codec`: what crosses links between machines, `"auto"` (as measured), `"exact"`, a policy (`"naive"`, `"mzhybrid"`,
    `"zhybrid"`) or the codec of gradients (`"int8"`, `"zfp:8"` …), which on one machine is used there.
    `nonfinite`: what becomes of NaN and infinity in what is encoded: `"pass"` (they arrive as they are), `"stop"` (the
    run ends, and names the rank).
    """

    timeout: str = "60s"
    bucket: str = "25MiB"
    codec: str = "auto"
    nonfinite: Literal["pass", "stop"] = "pass"


class Launch(Options, frozen=True):
    """How ranks are started on the hosts of `--hosts`, and where they meet.

    `command`: what runs `{command}` (one line of shell) on `{host}`; `interface`: a network interface (`"eth1"`), an
    address or a network (`"10.8.0.0/24"`) that all traffic stays on (default: the one on the way to the first host);
    `port`: where the ranks meet on the first host (0: any free one); `python`: the interpreter that has Espalier
    there (default: the path of the one here).
    """

    command: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 {host} {command}"
    interface: str | None = None
    port: int = 0
    python: str | None = None


# --- [sync] ------------------------------------------------------------------------------------------------------


class Auto(Choice, frozen=True, tag="auto"):
    """At every step, or by rounds where the links between machines are so slow that little else would happen."""


class EveryStep(Choice, frozen=True, tag="every_step"):
    """Replicas agree at every step: plain data parallel."""


class ByRounds(Choice, frozen=True):
    """Replicas take `steps` steps of their own in a round, then agree. What is left out is the method's own, the number
    of steps and the codec what the links ask for; see `sync.choices`.

    `replicas`: in how many parts the ranks are cut (as many as machines). `adapt`: rounds follow the measured waits.
    """

    replicas: int | None = None
    steps: int | None = None
    adapt: bool = True
    codec: str | None = None
    average: Literal["parameters", "differences"] | None = None
    delay: float | None = None
    fragments: int | None = None
    rate: float | None = None
    momentum: float | None = None
    nesterov: bool | None = None
    clip: float | None = None
    scaled: bool | None = None
    penalty: Literal["none", "norm", "per_tensor", "constant"] | None = None
    constant: float | None = None
    mixing: float | None = None
    eager: bool | None = None


class LocalSgd(ByRounds, frozen=True, tag="local_sgd"):
    """The mean of the replicas after each round (arXiv 1805.09767)."""


class SlowMo(ByRounds, frozen=True, tag="slowmo"):
    """With momentum between rounds (arXiv 1910.00643)."""


class DiLoCo(ByRounds, frozen=True, tag="diloco"):
    """With Nesterov momentum between rounds (arXiv 2311.08105)."""


class StreamingDiLoCo(ByRounds, frozen=True, tag="streaming_diloco"):
    """In fragments, behind the next steps, in four bits (arXiv 2501.18512)."""


class Co2(ByRounds, frozen=True, tag="co2"):
    """One round late, so that the exchange is hidden behind it (arXiv 2401.16265)."""


class Eager(ByRounds, frozen=True, tag="eager"):
    """As CO2, but a replica goes on from its own progress while that travels (arXiv 2502.12996)."""


Sync = Auto | EveryStep | LocalSgd | SlowMo | DiLoCo | StreamingDiLoCo | Co2 | Eager


class Track(Options, frozen=True):
    """What is recorded beside the run log. `profile = [from, to]` writes a Chrome trace of those steps."""

    tensorboard: bool = False
    profile: tuple[int, int] | None = None
    sample: str | None = None


class Recipe(Options, frozen=True):
    """One recipe. `[[data]]` may repeat; one `[data]` table is a mixture of one."""

    model: Model
    data: tuple[Data, ...] = ()
    graph: Graph | None = None
    name: str = "run"
    train: Train = Train()
    plan: Planning = Planning()
    checkpoint: Checkpoint = Checkpoint()
    comm: Comm = Comm()
    faults: Faults = Faults()
    sync: Sync = Auto()
    launch: Launch = Launch()
    track: Track = Track()


# Keys that may differ when an existing run folder is taken up again: they say how the run is carried out, not what
# it means. `train.steps` may only grow.
RESUMABLE = (
    *(
        "plan",
        "checkpoint",
        "comm",
        "faults",
        "launch",
        "track",
        "train.steps",
        "train.validate_every",
        "train.compile",
        "name",
    ),
    *("graph.order", "graph.format", "graph.pickle"),
)
