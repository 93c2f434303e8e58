"""examples/skypilot.yaml: keys that SkyPilot knows, and a command that torchrun and espalier take."""

import shlex
import subprocess
from pathlib import Path

import yaml
from torch.distributed.run import parse_args

from espalier.cli import main as cli

FILE = Path(__file__).parents[2] / "examples" / "skypilot.yaml"
KEYS = {"name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run", "envs", "secrets"}
"""Of a task (docs.skypilot.co, "Task YAML")."""


def test_its_keys_are_those_of_a_task():
    task = yaml.safe_load(FILE.read_text())
    assert set(task) <= KEYS
    assert set(task["resources"]) <= {"accelerators", "use_spot"}
    assert task["num_nodes"] == 2


def test_its_command_is_one_of_torchrun_s_and_ours():
    text = yaml.safe_load(FILE.read_text())["run"]
    variables = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "PATH": "/usr/bin:/bin",
    }
    shown = f'torchrun() {{ printf "%q " "$@"; }}\n{text}'
    done = subprocess.run(["bash", "-c", shown], env=variables, capture_output=True, text=True, check=True)
    found = parse_args(shlex.split(done.stdout))
    assert (found.nnodes, found.nproc_per_node, found.node_rank) == ("2", "8", 1)
    assert (found.master_addr, found.max_restarts, found.training_script) == ("10.0.0.1", 3, "espalier")
    given = cli.parsers()[0].parse_args(found.training_script_args)
    assert given.verb == "train"
    assert (FILE.parent.parent / given.recipe).exists()
