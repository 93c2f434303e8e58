"""Recipe sections: one frozen struct a table; `[model]` and what mechanisms bring are elsewhere. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec import field

from espalier.recipe.serialization import Value


class Options(Value, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all option structs: frozen, keyword only, unknown keys are errors."""

    def check(self, recipe: RecipeBase) -> None:
        """Raises UserError where options that a mechanism brings contradict each other or the rest of the recipe."""


AnyOptions = TypeVar("AnyOptions", bound=Options)


class Choice(Options, frozen=True, tag_field="kind"):
    """Base of the alternatives of a tagged union; the key `kind` says which one is meant."""


class Model(Choice, frozen=True):
    """Base of what `[model]` may be: one struct for each `model.kind`."""


Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32", "fp64"]
Recompute = Literal["none", "selective", "block"]


# --- [data] ------------------------------------------------------------------------------------------------------


class Data(Options, frozen=True):
    """One source of training data; several `[[data]]` tables make a weighted mixture.

    `packing`: text is cut into windows of `train.sequence` tokens, so one may hold several documents. In a `stream`
    later ones see earlier ones; with `documents` each sees itself only, and its positions start at 0. `tokenizer`:
    `"auto"` is that of `model.initial`, else `"bytes"`.
    """

    path: str
    weight: float = 1.0
    field: str = "text"
    split: str = "train"
    tokenizer: str = "auto"
    validation: float = 0.01
    packing: Literal["stream", "documents"] = "stream"
    cache: str | None = None


# --- [graph] ---------------------------------------------------------------------------------------------------------


class GraphParts(Options, frozen=True):
    """A part of the graph for each rank. `parts`: a `.npy` file with the rank of each node, in the order of the data;
    empty: the graph is cut for the plan."""

    parts: str = ""


class GraphOptions(Options, frozen=True):
    """What is asked of a graph, and how it is read.

    `fanout` neighbours are drawn at each layer, the one next to the targets first (-1: all of them); empty trains on
    the whole graph, `auto` on that (on one rank, or as `halo` says) or on drawn batches, whichever the plan finds
    faster; steps are then passes over the training nodes. `split` are the shares of training, validation and test
    where the data brings none, or the number of one of the splits that its masks are of; `all`: each of these is
    trained in turn. `inductive` hides held-out nodes while training; `undirected` lets messages flow both ways along
    each edge; `negatives` are drawn for each true link; `pickle` allows files whose loading may run code. `halo`: the
    whole graph is cut over the ranks; without it each rank passes over all of it. `target`: what labels are, classes,
    tasks (yes or no) or values of a regression; left out, what they look like. `standardise`: columns of a table of
    nodes are standardised by the rows that train. `text`: columns that each of these that has words is hashed into, at
    most. `relation`: the kind of edges that is read of a PyG HeteroData.
    """

    task: Literal["node", "link", "graph"] = "node"
    target: Literal["classes", "tasks", "values"] | None = None
    fanout: tuple[int, ...] | Literal["auto"] = ()
    split: tuple[float, float, float] | int | Literal["all"] = (0.6, 0.2, 0.2)
    inductive: bool = False
    undirected: bool = True
    standardise: bool = True
    text: int = 128
    relation: str | None = None
    negatives: int = 1
    pickle: bool = False
    order: Literal["auto", "none", "rcmpp", "clusters"] = "auto"
    format: Literal["auto", "csr", "cbm"] = "auto"
    halo: GraphParts | None = None

    @property
    def fanouts(self) -> tuple[int, ...]:
        """`fanout`, where that is no longer open; empty: the whole graph."""
        return () if self.fanout == "auto" else self.fanout

    @property
    def shares(self) -> tuple[float, float, float]:
        """`split`, where it is of shares."""
        return self.split if isinstance(self.split, tuple) else (0.6, 0.2, 0.2)


# --- [store] -----------------------------------------------------------------------------------------------------


class DiskOptions(Options, frozen=True):
    """What waits on disk. `memory`: bytes of features that the ranks of a machine may hold; `path`: a folder, or one
    for each of several disks (default: the cache folder)."""

    memory: str | int = "512MiB"
    path: str | tuple[str, ...] | None = None


# --- [[towers]] and [[tasks]] ------------------------------------------------------------------------------------


class Tower(Options, frozen=True):
    """One tower of a model of several tasks: `depth` blocks of `width` columns.

    `kind`: what it reads of a sample: the `text`, the `image`, the node and its neighbours in a `graph`, or the ray of
    a scene, whose field on `voxels` it is (`resolution`: cells of a side; two layers of colours). `takes`: towers whose
    outputs stand before what it reads itself.
    """

    name: str
    kind: Literal["text", "image", "graph", "voxels"] = "text"
    width: int = 64
    depth: int = 2
    resolution: int = 64
    takes: tuple[str, ...] = ()


class TaskOptions(Options, frozen=True):
    """One of several tasks: its data, the towers whose outputs its loss takes, samples in a step, and its weight.

    `data`: `python:glyphs` (pictures of named characters), a text, a graph or a scene as `[data]` has them, or
    `module:function`, which returns a dataset of dictionaries.
    """

    name: str
    data: str
    towers: tuple[str, ...]
    loss: Literal["contrastive", "next_token", "classes", "colours"]
    batch: int = 32
    weight: float = 1.0


# --- [tune] ------------------------------------------------------------------------------------------------------


class Tuning(Choice, frozen=True):
    """Training on conversations, with a loss on the assistant's tokens only.

    `longer`: what becomes of a conversation of more than `train.sequence` tokens: it is left out (`"drop"`) or loses
    its end (`"cut"`). `template`: a file with a Jinja chat template (default: the tokenizer's own, else ChatML).
    """

    longer: Literal["drop", "cut"] = "drop"
    template: str | None = None


class Full(Tuning, frozen=True, tag="full"):
    """All weights are trained."""


class Adapters(Tuning, frozen=True):
    """Low-rank adapters beside frozen weights (LoRA, arXiv 2106.09685). Only they are exchanged and saved.

    `rank`: columns of an adapter's two matrices; `alpha`: its product is scaled by alpha / rank (default: 2 x rank), or
    with `rslora` by alpha / sqrt(rank) (arXiv 2312.03732); `targets`: linear layers that get one (default: all of a
    block); `dora`: directions and lengths of columns are trained apart (arXiv 2402.09353); `frozen`: how the frozen
    matrices are stored: as they are, in bf16, or as int8 or int4 codes with a scale for each row or group of columns;
    in fewer bits than 32 tables are bf16.
    """

    rank: int = 16
    alpha: float | None = None
    targets: tuple[Literal["query", "key", "value", "out", "gate", "up", "down"], ...] = ()
    rslora: bool = False
    dora: bool = False
    frozen: Literal["fp32", "bf16", "int8", "int4"] = "fp32"


class Lora(Adapters, frozen=True, tag="lora"):
    """Adapters are trained. `adapter`: a folder of adapters in PEFT's format that training goes on from."""

    adapter: str | None = None


class Dpo(Adapters, frozen=True, tag="dpo"):
    """Direct preference optimization (arXiv 2305.18290) from pairs of answers, of which one is preferred.

    `beta`: how far the model may go from the reference, which is the model before training. `rank = 0` trains all
    weights, and keeps a frozen copy of them as the reference.
    """

    beta: float = 0.1


# --- [train] -----------------------------------------------------------------------------------------------------


class Adamw(Choice, frozen=True, tag="adamw"):
    """AdamW (fused) on every parameter; `coupled`: Adam, the decay a part of the gradient (L2)."""

    learning_rate: float | None = None
    weight_decay: float | None = 0.1
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

    warmup: float | None = 0.02
    decay: float = 0.4
    floor: float = 0.0


class Cosine(Choice, frozen=True, tag="cosine"):
    """Linear warmup, then half a cosine down to `floor`. Shares of all steps."""

    warmup: float = 0.02
    floor: float = 0.1


class Constant(Choice, frozen=True, tag="constant"):
    """The same rate at every step."""


VALIDATE_TOKENS = 65_536
"""Held-out tokens of a validation, where their time allows."""


class Train(Options, frozen=True):
    """How long, with what batch, at which precision."""

    steps: int | None = None
    sequence: int | None = None
    batch_tokens: int | None = None
    seed: int = 1
    precision: Precision = "auto"
    compile: bool = False
    recompute: Recompute | None = None
    optimizer: Muon | Adamw = Muon()
    schedule: Stable | Cosine | Constant = Stable()
    clip: float = 1.0
    validate_every: int | None = None
    validate_tokens: int | None = None


# --- [plan] ------------------------------------------------------------------------------------------------------


class ShardPin(Options, frozen=True):
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
    hp: int | None = None
    cp: int | None = None
    ep: int | None = None
    window: int | None = None
    placement: Literal["head_first", "context_first", "interleaved"] | None = None
    pp: int | None = None
    schedule: Literal["1f1b", "zero_bubble", "gpipe"] | None = None
    interleave: int | None = None
    algorithm: Literal["data", "megatron", "fsp", "isp"] | None = None
    shard: ShardPin | None = None
    prefetch: Literal["block", "attention", "none"] | None = None
    micro_batch: int | None = None
    accumulate: int | None = None
    recompute: Recompute | None = None
    loss_chunk: int | None = None
    feed_forward_chunk: int | None = None
    offload: Literal["none", "host", "disk", "node"] | None = None
    roles: tuple[Literal["aggregator", "standby"], ...] | None = None
    pipelines: str | None = None


class Planning(Options, frozen=True):
    """Where the plan comes from, and what it must obey.

    `memory`: bytes a rank may hold ("60GiB"); `redundancy`: ranks that hold each shard of the optimizer's state;
    `max_devices`: devices to use at most; `calibration`: measured runs (a file, or a run's folder) to learn from;
    `seconds`: of one core that the search takes at most, once a plan fits.
    """

    cluster: str | None = None
    trial: bool = True
    memory: str | int | None = None
    redundancy: int = 1
    max_devices: int | None = None
    calibration: str | None = None
    seconds: float = 120.0
    pin: Pin = Pin()


# --- the rest ----------------------------------------------------------------------------------------------------


class Checkpoint(Options, frozen=True):
    """When the state is saved, and where. `target`: a folder, or the URL of a store of objects (`storage.PROTOCOLS`).

    `every`: steps, or `"auto"`: from what saves are measured to cost and how often something fails. `rate`: bytes per
    second that a machine writes at most, as `"200MB/s"`; None: as fast as its disk or network goes.
    """

    every: int | Literal["auto"] = "auto"
    keep: int = 2
    keep_best: bool = True
    target: str | None = None
    rate: str | None = None


class Comm(Options, frozen=True):
    """What every exchange obeys.

    `bucket`: gradients exchanged at once, `"auto"` (as the plan says) or a size.
    `codec`: what crosses links between machines, `"auto"` (as measured), `"exact"`, a policy (`"naive"`, `"mzhybrid"`,
    `"zhybrid"`) or the codec of gradients (`"int8"`, `"zfp:8"` …), which on one machine is used there.
    `nonfinite`: what becomes of NaN and infinity in what is encoded: `"pass"` (they arrive as they are), `"stop"` (the
    run ends, and names the rank).
    `experts`: how rows go to experts of other ranks: `"exact"`, or in eight bits (`"int8"`).
    """

    timeout: str = "60s"
    bucket: str = "auto"
    codec: str = "auto"
    nonfinite: Literal["pass", "stop"] = "pass"
    experts: Literal["exact", "int8"] = "exact"


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


# --- [faults] --------------------------------------------------------------------------------------------------------


class Faults(Options, frozen=True):
    """What becomes of a run when something breaks (docs/faults.md).

    `restarts`: how often one cause may be answered by starting again without the run getting further (`"auto"`: never
    where an unchanged run cannot succeed, once where code raised, else three times); `heartbeat`: between two signs of
    life of a rank; `memory`: what copies of the state may take of a machine's memory (`"auto"`: a quarter of what is
    free; 0: there are none, and a restart goes back to the newest checkpoint); `rollback`: steps in which a loss that
    rose may come back by itself before the run is put back and the batches are left out, or `"never"`; `plateau`: steps
    in which a loss is expected to fall while the learning rate is high; that it did not is reported, no more;
    `changed_data`: whether a run is taken up again on data that is not what it was begun with.
    """

    restarts: Literal["auto"] | int = "auto"
    heartbeat: str = "1s"
    memory: str | int = "auto"
    rollback: Literal["never"] | int = 50
    plateau: Literal["never"] | int = "never"
    changed_data: Literal["refuse", "accept"] = "refuse"


# --- [sync] ------------------------------------------------------------------------------------------------------


class Sync(Choice, frozen=True):
    """When replicas agree; `by_rounds`: after several steps of their own."""

    by_rounds = False


class Auto(Sync, frozen=True, tag="auto"):
    """At every step, or by rounds where the links between machines are so slow that little else would happen."""


class EveryStep(Sync, frozen=True, tag="every_step"):
    """Replicas agree at every step: plain data parallel."""


if TYPE_CHECKING:
    CoreSync = Sync
else:  # msgspec reads the annotation; a row of `mechanism_options` adds alternatives
    CoreSync = Auto | EveryStep


class Track(Options, frozen=True):
    """What is recorded beside the run log. `profile = [from, to]` writes a Chrome trace of those steps; `to`: trackers
    that are shown the run log as it is written; `sample`: the prompt of what is shown at the end, False: nothing is."""

    tensorboard: bool = False
    to: tuple[Literal["tensorboard", "trackio", "mlflow", "wandb"], ...] = ()
    profile: tuple[int, int] | None = None
    sample: str | bool | None = None


class RecipeBase(Options, frozen=True):
    """A recipe, whatever kind of model it trains. `[[data]]` may repeat; one `[data]` table is a mixture of one."""

    model: Model
    data: tuple[Data, ...] = ()
    graph: GraphOptions | None = None
    store: DiskOptions | None = None
    mechanisms: dict[str, Options] = field(default_factory=dict)
    """What mechanisms bring: the options of their tables, by name; see `recipe.mechanism_options`."""
    tune: Full | Lora | Dpo | None = None
    towers: tuple[Tower, ...] | None = None
    tasks: tuple[TaskOptions, ...] | None = None
    name: str = "run"
    train: Train = Train()
    plan: Planning = Planning()
    checkpoint: Checkpoint = Checkpoint()
    comm: Comm = Comm()
    faults: Faults = Faults()
    sync: CoreSync = Auto()
    launch: Launch = Launch()
    track: Track = Track()

    def options(self, kind: type[AnyOptions]) -> AnyOptions | None:
        """What the table of a mechanism says whose options are of `kind`; None: the recipe does not have it."""
        return next((options for options in self.mechanisms.values() if isinstance(options, kind)), None)
