"""Manifests for Kubernetes: their fields are those of the published schemas, their command trains, their resources are
the plan's."""

import json
import os
import subprocess
import sys

import msgspec
import pytest
import yaml as reader

from espalier.cli import kubernetes
from espalier.cli import main as cli
from espalier.plan import base as plans
from espalier.recipe.errors import UserError

RECIPE = """
name = "My job"
[model]
depth = 1
width = 32
heads = 2
[data]
path = "corpus"
[train]
steps = 6
sequence = 32
batch_tokens = 256
validate_tokens = 64
[plan]
trial = false
cluster = "cluster.toml"
[plan.pin]
ranks = 4
threads = 1
"""
CLUSTER = """
[[nodes]]
count = 2
device = "cpu"
cores = 2
memory = "4GiB"
[links.between]
latency = "50us"
bandwidth = "1Gbit/s"
"""
OPTIONS = "out.yaml image=registry.example.org/espalier:1 claim=work"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("kubernetes")
    (made / "recipe.toml").write_text(RECIPE)
    (made / "cluster.toml").write_text(CLUSTER)
    (made / "corpus").mkdir()
    for number in range(12):
        (made / "corpus" / f"{number}.txt").write_text(f"The number {number} comes before {number + 1}.\n" * 40)
    return made


@pytest.fixture(scope="module")
def written(folder):
    """(config map, job) of each kind."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        found = {}
        for kind in ("jobset", "trainjob"):
            assert cli.main(["train", "recipe.toml", "train.seed=3", "--kubernetes", f"{OPTIONS} kind={kind}"]) == 0
            found[kind] = list(reader.safe_load_all((folder / "out.yaml").read_text()))
    finally:
        os.chdir(before)
    return found


def schema(name):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    return getattr(models, name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "model"), [("jobset", "JobsetV1alpha2JobSet"), ("trainjob", "TrainerV1alpha1TrainJob")]
)
def test_every_field_is_one_of_the_published_schema_s(written, kind, model):
    config, job = written[kind]
    for part, name in ((config, "IoK8sApiCoreV1ConfigMap"), (job, model)):
        try:
            known = schema(name)
        except AttributeError:
            assert name == "IoK8sApiCoreV1ConfigMap"  # the package leaves it out
            continue
        assert known.from_dict(part).to_dict() == part  # what a schema lacks is not in what it gives back


def test_a_field_that_is_misspelt_would_be_seen(written):
    known = schema("JobsetV1alpha2JobSet")
    job = json.loads(json.dumps(written["jobset"][1]))
    job["spec"]["failurePolicy"]["maxRestart"] = 3
    assert known.from_dict(job).to_dict() != job


def test_pods_processors_and_memory_are_the_plan_s(written, folder):
    (_, job) = written["jobset"]
    (node,) = job["spec"]["replicatedJobs"]
    spec = node["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (2, 2, "Indexed")
    (container,) = spec["template"]["spec"]["containers"]
    trainer = written["trainjob"][1]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["resourcesPerNode"] == container["resources"]
    assert container["resources"]["requests"]["cpu"] == "2"
    assert container["resources"]["requests"]["memory"].endswith("Mi")
    assert written["jobset"][0]["data"]["recipe.toml"] == RECIPE


def test_the_memory_covers_the_predicted_peak_and_gpus_are_asked_for():
    ranks = tuple(plans.Rank(device=f"cuda:{slot}", node=node, threads=2) for node in (0, 1, 2) for slot in (0, 1))
    asked = kubernetes.pods(plans.Plan(ranks=ranks))
    assert (asked.count, asked.ranks, asked.gpus, asked.processors) == (3, 2, 2, 4)
    costs = plans.Predicted(1.0, 1.0, 1.0, 0.0, {}, {"peak": 1e9}, 2e9, {})
    on_cpus = tuple(plans.Rank(node=node) for node in (0, 0, 1, 1))
    assert kubernetes.pods(plans.Plan(ranks=on_cpus, predicted=costs)).memory >= 2 * 1e9
    with pytest.raises(UserError, match="unlike machines"):
        kubernetes.pods(plans.Plan(ranks=(plans.Rank(), plans.Rank(node=1), plans.Rank(node=1))))
    with pytest.raises(UserError, match="with and without a GPU"):
        kubernetes.pods(plans.Plan(ranks=(plans.Rank(), plans.Rank(device="cuda:0"))))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not FILE name=value"),
        ("a.yaml image", "not FILE name=value"),
        ("a.yaml claim=work", "image= is missing"),
        ("a.yaml image=i", "claim= is missing"),
        ("a.yaml image=i claim=c kind=pod", "kind=pod is not known"),
        ("a.yaml image=i claim=C_1", "no name of Kubernetes"),
        ("a.yaml image=i claim=c restarts=x", "no whole number"),
        ("a.yaml image=i claim=c colour=red", "no option 'colour'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        kubernetes.options(text)


def test_with_another_launcher_or_a_run_folder_it_is_refused(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert cli.main(["train", "recipe.toml", "--kubernetes", OPTIONS, "--slurm", ""]) == 2
    assert "--slurm and --kubernetes" in capsys.readouterr().err
    assert cli.main(["train", "recipe.toml", "--kubernetes", OPTIONS, "--run", "runs/x"]) == 2
    assert "name=x" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "a: b\n\tc\n", "one\n\n  two # three\n", " one\ntwo\n", "one\n\n", "one\ntwo", "größer\nals\n", "a\x07b\nc\n"],
)
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_what_is_written_is_read_back(text, kind):
    wanted = kubernetes.options(f"out.yaml image=i:1 claim=c kind={kind} namespace=yes")
    words, files = ["a=\"<&>é\" # 'b'", "name=null"], {"recipe.toml": text}
    asked = kubernetes.Pods(count=2, ranks=3, processors=4, memory=5 << 20, gpus=1)
    config, job = reader.safe_load_all(kubernetes.manifest(wanted, asked, words, files))
    assert config["data"] == files
    assert config["metadata"] == {"name": "null-recipe", "namespace": "yes"}
    assert job["metadata"] == {"name": "null", "namespace": "yes"}
    commands = [line for line in map(str.strip, str(job).split("'command': ")) if line.startswith("[")]
    assert words[0] in commands[0].replace("\\'", "'")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_pods_train_with_the_manifest_s_command(written, folder, tmp_path):
    """Its files and variables, on this machine: the claim is a folder, the first pod's name loopback."""
    config, job = written["jobset"]
    (container,) = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text)
    words = [word.replace("/etc/espalier", str(tmp_path)) for word in container["command"]]
    words[0] = sys.executable
    started = []
    for pod in range(2):
        environment = {one["name"]: one.get("value", str(pod)) for one in container["env"]}
        environment |= {"PET_MASTER_ADDR": "127.0.0.1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        started.append(subprocess.Popen(words, cwd=folder, env={**os.environ, **environment}))
    assert [one.wait(300) for one in started] == [0, 0]
    events = [msgspec.json.decode(line) for line in (folder / "runs/my-job/events.jsonl").read_text().splitlines()]
    assert [one["step"] for one in events if one["event"] == "step"] == list(range(1, 7))
