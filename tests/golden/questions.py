"""The questions whose answers are stored: examples on clusters with pins, docs/advice.md, and drawn recipes.

Data that differs from machine to machine (modules that are installed, fonts, the standard library) is replaced by data
of fixed content, so that a question says everything that its answer depends on.
"""

from __future__ import annotations

import json
import random
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

STORE_DISK = '[[nodes.disks]]\npath = "/data"\nread = 2e9\nwrite = 1e9\niops = 1e5\n'
CLUSTERS = {
    "laptop": f'[[nodes]]\ndevice = "cpu"\ncores = 8\nmemory = "16GiB"\n{STORE_DISK}',
    "two laptops": f'[[nodes]]\ndevice = "cpu"\ncount = 2\ncores = 4\nmemory = "8GiB"\n{STORE_DISK}\n'
    '[links]\nbetween = "1Gbit/s"\n',
    "eight 4090": f'[[nodes]]\ndevice = "RTX 4090"\ndevices = 8\n{STORE_DISK}',
    "a100": (EXAMPLES / "a100.toml").read_text(encoding="utf-8"),
    "four sites": '[[nodes]]\ndevice = "A100-80GB"\ncount = 4\n\n[links]\nbetween = "100Mbit/s"\n',
    "unequal": (EXAMPLES / "unequal-cluster.toml").read_text(encoding="utf-8"),
}
PINS: dict[str, tuple[str, ...]] = {
    "no pin": (),
    "two replicas": ("plan.pin.ranks=2", "plan.pin.dp=2"),
    "tensor": ("plan.pin.ranks=2", "plan.pin.tp=2"),
    "stages": ("plan.pin.ranks=2", "plan.pin.pp=2", "plan.pin.schedule=zero_bubble"),
    "heads and context": ("plan.pin.ranks=4", "plan.pin.hp=2", "plan.pin.cp=2"),
    "shards": ("plan.pin.ranks=4", "plan.pin.shard.optimizer=4", "plan.pin.shard.grads=2"),
    "recompute": ("plan.pin.micro_batch=1", "plan.pin.recompute=block"),
    "host": ("plan.pin.offload=host",),
    "node": ("plan.pin.ranks=2", "plan.pin.offload=node"),
    "experts": ("plan.pin.ranks=4", "plan.pin.ep=2"),
    "unequal": ("plan.pin.pipelines=unequal",),
    "rounds": ("sync.kind=diloco", "comm.codec=int8"),
}
THINNED = 3
"""Each example has each pin on one in so many clusters, so that all questions are asked in a minute or two."""
WORDS_ON = ("two laptops", "a100")
"""Clusters on which the words of a plan are stored too."""

FIXED_DATA = {
    "python:stdlib": "text.txt",
    "python:docstrings": "chats.jsonl",
    "python:imports": "planted:nodes=2000,degree=6,features=32,classes=8",
    "planted:nodes=100000": "planted:nodes=2000",
    "python:glyphs": "pictures:samples",
    '"knot:"': '"spheres:views=4,size=16"',
}
"""What is read in place of what an example names."""


@dataclass(frozen=True)
class Question:
    """One command line of `espalier plan`: files are relative to the folder of `scenery`."""

    recipe: str
    cluster: str
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ("--json",)

    @property
    def words(self) -> list[str]:
        """The command line. Trials of real steps would differ from machine to machine."""
        changes = [*self.overrides, "plan.trial=false"]
        return ["plan", self.recipe, "--cluster", self.cluster, *self.options, *changes]


@cache
def example_names() -> tuple[str, ...]:
    """Recipes among the examples, but for that whose model is on the hub; the other files are clusters."""
    files = sorted(EXAMPLES.glob("*.toml"))
    known = (file.stem for file in files if "[model]" in file.read_text(encoding="utf-8"))
    return tuple(name for name in known if name != "any_hf_model")


@cache
def questions() -> dict[str, Question]:
    """All questions by their names, of which the part before the first colon groups them."""
    return dict([*_of_examples(), *_of_advice(), *_of_drawn()])


def _of_examples() -> Iterator[tuple[str, Question]]:
    for name in example_names():
        recipe, first = f"examples/{name}.toml", zlib.crc32(name.encode())
        for column, cluster in enumerate(CLUSTERS):
            file = _cluster_file(cluster)
            for row, (pin, overrides) in enumerate(PINS.items()):
                if overrides and (column + row + first) % THINNED:
                    continue
                yield f"{name}: {cluster}, {pin}", Question(recipe, file, overrides)
            if cluster in WORDS_ON:
                yield f"{name}: {cluster}, words", Question(recipe, file, (), ())


def _of_advice() -> Iterator[tuple[str, Question]]:
    for number, asked in enumerate(_advice()):
        recipe, cluster = f"advice/{number}.toml", f"advice/{number}-cluster.toml"
        options = ("--json", "--what-if", asked.better) if asked.better else ("--json",)
        yield f"advice: {asked.title}", Question(recipe, cluster, (), options)


def _of_drawn() -> Iterator[tuple[str, Question]]:
    for number, (_, cluster) in enumerate(drawn_recipes()):
        yield f"drawn: {number}", Question(f"drawn/{number}.toml", _cluster_file(cluster))


def _cluster_file(cluster: str) -> str:
    return f"clusters/{cluster.replace(' ', '-')}.toml"


def _advice() -> tuple[Any, ...]:
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import advice
    finally:
        sys.path.remove(str(ROOT / "bench"))
    made: tuple[Any, ...] = advice.QUESTIONS
    return made


# --- files -------------------------------------------------------------------------------------------------------


def scenery(folder: Path) -> None:
    """Writes the files that questions name."""
    files = {_cluster_file(name): text for name, text in CLUSTERS.items()}
    for name in example_names():
        text = (EXAMPLES / f"{name}.toml").read_text(encoding="utf-8")
        files[f"examples/{name}.toml"] = _with_fixed_data(text, "pairs.jsonl" if name == "dpo" else "chats.jsonl")
    files["examples/mine.py"] = (EXAMPLES / "mine.py").read_text(encoding="utf-8")
    files["examples/pictures.py"] = PICTURES
    files["examples/unequal-cluster.toml"] = CLUSTERS["unequal"]
    for number, asked in enumerate(_advice()):
        files[f"advice/{number}.toml"] = _with_fixed_data(asked.recipe, "chats.jsonl")
        files[f"advice/{number}-cluster.toml"] = asked.cluster
    files["advice/residual.py"] = (ROOT / "bench" / "residual.py").read_text(encoding="utf-8")
    for number, (recipe, _) in enumerate(drawn_recipes()):
        files[f"drawn/{number}.toml"] = recipe
    files["runs/chat/export-hf/config.json"] = json.dumps(WEIGHTS)
    files |= _texts()
    for name, text in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def _with_fixed_data(recipe: str, chats: str) -> str:
    for name, fixed in (FIXED_DATA | {"python:docstrings": chats}).items():
        recipe = recipe.replace(name, fixed)
    return recipe


def _texts() -> dict[str, str]:
    draw = random.Random(1)
    vocabulary = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(500)]

    def sentence(words: int) -> str:
        return " ".join(draw.choices(vocabulary, k=words))

    chats, pairs = [], []
    for _ in range(400):
        asked, chosen, rejected = sentence(12), sentence(20), sentence(20)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": chosen}]
        chats.append(json.dumps({"messages": messages}))
        pairs.append(json.dumps({"prompt": asked, "chosen": chosen, "rejected": rejected}))
    text = "\n".join(sentence(14) for _ in range(4000))
    return {"text.txt": text, "chats.jsonl": "\n".join(chats), "pairs.jsonl": "\n".join(pairs)}


PICTURES = '''"""Pictures with names, of fixed sizes."""

import torch


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        text = torch.full((48,), index % 256)
        return {"image": torch.full((1, 28, 28), index % 256, dtype=torch.uint8), "text": text}


def samples():
    return Samples()
'''
WEIGHTS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""The `config.json` of weights that examples go on from."""


# --- drawn recipes -------------------------------------------------------------------------------------------------

DRAWN = 40
SEED = 44
MOST_RANKS = {"laptop": 2, "two laptops": 2, "eight 4090": 8, "a100": 64, "four sites": 4, "unequal": 3}
"""Ranks that a pin may ask for."""


@cache
def drawn_recipes() -> tuple[tuple[str, str], ...]:
    """Recipes over the planner's options, each with the name of a cluster."""
    draw = random.Random(SEED)
    makers = (_decoder, _mixture, _decoder, _graph)
    recipes = []
    for number in range(DRAWN):
        cluster = draw.choice(list(CLUSTERS))
        recipes.append((makers[number % len(makers)](draw, cluster), cluster))
    return tuple(recipes)


def _decoder(draw: random.Random, cluster: str) -> str:
    large = cluster not in ("laptop", "two laptops", "unequal")
    shapes = ("tinyllama-1b", "llama3-8b", "llama-13b") if large else ("smollm2-135m", "gpt2-124m")
    shaped = f'shape = "{draw.choice(shapes)}"'
    sized = f"depth = {draw.choice((4, 8, 12))}\nwidth = {draw.choice((128, 512, 1024))}\nheads = 8"
    model = f'kind = "gpt"\n{draw.choice((shaped, sized))}'
    return _language(draw, cluster, model, ("tp", "sp", "hp", "pp", "cp", "dp"))


def _mixture(draw: random.Random, cluster: str) -> str:
    size = f"depth = {draw.choice((2, 8, 16))}\nwidth = {draw.choice((128, 512, 1024))}\nheads = 8"
    routing = f"experts = {draw.choice((4, 8, 16))}\nactive = {draw.choice((1, 2))}"
    return _language(draw, cluster, f'kind = "moe"\n{size}\n{routing}', ("ep", "ep", "pp", "dp", "tp"))


def _language(draw: random.Random, cluster: str, model: str, pins: tuple[str, ...]) -> str:
    sequence = draw.choice((256, 512, 1024))
    train = [
        "steps = 1000",
        f"sequence = {sequence}",
        f"batch_tokens = {sequence * draw.choice((16, 64, 256))}",
        f'precision = "{draw.choice(("auto", "auto", "bf16", "fp32"))}"',
        f'optimizer = {{ kind = "{draw.choice(("adamw", "muon"))}" }}',
        *draw.choice(([], [], ["compile = true"], ['recompute = "selective"'])),
    ]
    rounds = ("auto", "local_sgd", "slowmo", "diloco", "streaming_diloco", "co2", "eager")
    sync = draw.choice(rounds) if cluster in ("two laptops", "a100", "four sites") else "every_step"
    codec = draw.choice(("auto", "exact", "naive", "mzhybrid", "zhybrid", "int8", "zfp:8"))
    comm = [f'codec = "{codec}"', f'bucket = "{draw.choice(("auto", "8MiB"))}"']
    if "moe" in model:
        comm.append(f'experts = "{draw.choice(("exact", "int8"))}"')
    parts = [
        f"[model]\n{model}",
        '[data]\npath = "text.txt"',
        "[train]\n" + "\n".join(train),
        f'[sync]\nkind = "{sync}"',
        "[comm]\n" + "\n".join(comm),
        _plan(draw, cluster, pins),
        _saves(draw),
    ]
    return "\n\n".join(parts) + "\n"


def _plan(draw: random.Random, cluster: str, pins: tuple[str, ...]) -> str:
    lines = draw.choice(([], [], [], ["redundancy = 2"], ["max_devices = 4"], ['memory = "6GiB"']))
    degrees = [degree for degree in (2, 4) if degree <= MOST_RANKS[cluster]]
    cut = f"{draw.choice(pins)} = {draw.choice(degrees)}"
    offload = 'offload = "host"' if cluster in ("a100", "four sites", "unequal") else 'offload = "disk"'
    rest = draw.choice((offload, "micro_batch = 1", 'recompute = "block"', "shard = { optimizer = 2 }"))
    pinned = draw.choice(([], [cut], [cut], [rest], [cut, rest]))
    return "\n".join(["[plan]", *lines, "", "[plan.pin]", *pinned])


def _saves(draw: random.Random) -> str:
    every = draw.choice(('"auto"', "50"))
    faults = draw.choice(("", '\n\n[faults]\nmemory = "1GiB"'))
    return f'[checkpoint]\nevery = {every}\nrate = "{draw.choice(("200MB/s", "1GB/s"))}"\nkeep = 2{faults}'


def _graph(draw: random.Random, cluster: str) -> str:
    kind = draw.choice(("gcn", "sage", "gat", "gin"))
    nodes, width = draw.choice((1000, 4000)), draw.choice((16, 64))
    data = f"planted:nodes={nodes},degree={draw.choice((4, 12))},features=64,classes=8"
    parts = [f'[model]\nkind = "{kind}"\nwidth = {width}', f'[data]\npath = "{data}"']
    batch = ""
    way = draw.choice(("auto", "drawn", "stored", "halo", "halo", "quant"))
    if way == "auto":
        parts.append('[graph]\nfanout = "auto"')
    elif way in ("drawn", "stored"):
        parts.append(f"[graph]\nfanout = [{draw.choice((5, 10))}, 5]")
        batch = f"\nbatch_tokens = {draw.choice((32, 128))}"
    elif way == "halo":
        options = draw.choice((
            'bits = "auto"\nsynchronize = 5\nlate = true',
            "bits = 1\nsynchronize = 5\nlate = true\nadapt = true",
            "bits = 4\nby_degree = true",
            "bits = 8\nsynchronize = 0\nlate = true\nstaleness = 2",
            "bits = 2\ndelta = true",
        ))  # fmt: skip
        parts.append(f"[graph.halo]\n{options}")
    elif way == "quant":
        parts[0] = parts[0].replace('"gat"', '"gcn"')
        parts.append(f'[quant]\nkind = "{draw.choice(("a2q", "mega", "uniform"))}"')
    if way == "stored":
        rows, again = draw.choice(("fp32", "bf16", "int8", "int4")), draw.choice((0.0, 0.25))
        parts.append(f'[store]\nmemory = "{draw.choice(("8MiB", "64MiB"))}"\nrows = "{rows}"\nresample = {again}')
    parts.append(f"[train]\nsteps = 100{batch}")
    parts.append(draw.choice(("", "[plan.pin]\nranks = 2")))
    return "\n\n".join(parts) + "\n"
