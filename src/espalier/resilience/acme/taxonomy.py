"""Why training jobs fail: the reasons of a six-month study, what each calls for, and the value a diagnosis is.

After Hu et al., "Characterization of Large Language Model Development in the Datacenter" (Acme), NSDI 2024, arXiv
2403.07648: 29 reasons in three categories. Ours are `Hang`, `Loss Anomaly`, `No Failure`,
`Unknown`, and the actions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

Action = Literal["retry", "isolate", "rollback", "stop", "none"]
"""retry: bounded restart; isolate: test the nodes, leave out those that fail, restart; rollback: an earlier checkpoint,
and skip the data that followed it; stop: a person must change something first; none: nothing has failed."""

ACTIONS: tuple[Action, ...] = ("retry", "isolate", "rollback", "stop", "none")

INFRASTRUCTURE, FRAMEWORK, SCRIPT, OTHER = "Infrastructure", "Framework", "Script", "Other"
UNKNOWN, NO_FAILURE, LOSS_ANOMALY, HANG = "Unknown", "No Failure", "Loss Anomaly", "Hang"


class Kind(NamedTuple):
    """What is known of a reason: its category, what to do about it unless a rule says otherwise, in one word and in
    a sentence."""

    category: str
    action: Action
    advice: str


REASONS: dict[str, Kind] = {
    "NVLink Error": Kind(
        INFRASTRUCTURE, "isolate",
        "drain the node and test its NVLinks: nvidia-smi nvlink -e, dcgmi diag -r 3",
    ),
    "CUDA Error": Kind(
        INFRASTRUCTURE, "isolate",
        "test the GPU (dcgmi diag -r 3); CUDA_LAUNCH_BLOCKING=1 finds the kernel if it comes back elsewhere",
    ),
    "Node Failure": Kind(INFRASTRUCTURE, "isolate", "leave the node out and start again from the newest checkpoint"),
    "ECC Error": Kind(
        INFRASTRUCTURE, "isolate",
        "drain the node; nvidia-smi -q -d ECC,ROW_REMAPPER tells whether the GPU must be replaced",
    ),
    "Network Error": Kind(
        INFRASTRUCTURE, "isolate",
        "test the link or the card (ibstat, ethtool, dmesg) before the node is used again",
    ),
    "Connection Error": Kind(
        INFRASTRUCTURE, "retry",
        "try again; if it stays, check name, port and firewall of the service",
    ),
    "S3 Storage Error": Kind(
        INFRASTRUCTURE, "retry",
        "try again with longer pauses between requests; check bucket, endpoint and credentials",
    ),
    "NCCL Timeout Error": Kind(
        INFRASTRUCTURE, "isolate",
        "test the node of the rank that did not arrive; its stack tells whether it computed, loaded or hung",
    ),
    "NCCL Remote Error": Kind(
        INFRASTRUCTURE, "isolate",
        "look at the rank that went away first: its own log, its node's dmesg",
    ),
    "Dataloader Killed": Kind(
        FRAMEWORK, "retry",
        "fewer workers, smaller prefetch, more host or shared memory (--shm-size)",
    ),
    "Attribute Error": Kind(FRAMEWORK, "stop", "correct the code, or the version of the library it was written for"),
    "Out of Memory Error": Kind(
        FRAMEWORK, "stop",
        "smaller micro-batch, recompute activations, or shard more (espalier plan says what fits)",
    ),
    "Runtime Error": Kind(FRAMEWORK, "stop", "correct what the message names"),
    "Assertion Error": Kind(FRAMEWORK, "stop", "make the configuration meet what the assertion demands"),
    "Value Error": Kind(FRAMEWORK, "stop", "correct the value that the message names"),
    "Zero Division Error": Kind(
        FRAMEWORK, "stop",
        "find out why the divisor is zero: an empty batch, split or interval",
    ),
    "Model Loading Error": Kind(
        FRAMEWORK, "stop",
        "compare the checkpoint with the model's configuration, and its files with their checksums",
    ),
    "Dataset Loading Error": Kind(
        FRAMEWORK, "stop",
        "build the data set or its index again, and look at the file that is named",
    ),
    "File Not Found Error": Kind(SCRIPT, "stop", "correct the path, or mount it on every node"),
    "OS Error": Kind(SCRIPT, "stop", "free space, raise the limit, or mount the file system again"),
    "Type Error": Kind(SCRIPT, "stop", "correct the call"),
    "Name Error": Kind(SCRIPT, "stop", "correct the name"),
    "Permission Error": Kind(SCRIPT, "stop", "give the job's user access, or name another place"),
    "Import Error": Kind(SCRIPT, "stop", "install the module in the environment that every node uses"),
    "Key Error": Kind(SCRIPT, "stop", "correct the key, or the configuration that lacks it"),
    "Syntax Error": Kind(SCRIPT, "stop", "correct the line"),
    "Argument Error": Kind(SCRIPT, "stop", "correct the command line"),
    "Called Process Error": Kind(SCRIPT, "stop", "run the command that failed by hand"),
    "Index Error": Kind(SCRIPT, "stop", "find the index that is out of range: often a token or label beyond the table"),
    HANG: Kind(
        OTHER, "isolate",
        "its stacks tell where it stood still; test its node if it comes back there",
    ),
    LOSS_ANOMALY: Kind(
        OTHER, "rollback",
        "go back to a checkpoint before that line, skip the data since, look at the learning rate",
    ),
    NO_FAILURE: Kind(OTHER, "none", "nothing to do"),
    UNKNOWN: Kind(OTHER, "retry", "read the evidence; a rule of your own (--rules) names it the next time"),
}  # fmt: skip


class Evidence(NamedTuple):
    """One line that speaks for a diagnosis: its number (from 1), its text, and what it shows."""

    line: int
    text: str
    shows: str


@dataclass(frozen=True)
class Diagnosis:
    """Why one log, or the logs of one run, ended as they did.

    Attributes:
        file: the log that holds the root line.
        category, reason: names of the taxonomy.
        root_line: number, from 1, of the line that first shows the cause.
        first_failing_rank, suspect_node: whose fault came first, and the host to test, where the log tells.
        action: what to do, see `Action`.
        evidence: the lines it rests on, the root line first.
        advice: what a person can do.
        source: what found it: `rules`, `losses`, `incidents` or `nothing`.
    """

    file: str
    category: str
    reason: str
    root_line: int | None
    first_failing_rank: int | None
    suspect_node: str | None
    action: Action
    evidence: tuple[Evidence, ...] = ()
    advice: str = ""
    source: str = "rules"


def restart_helps(diagnosis: Diagnosis) -> bool:
    """Whether starting again, on good nodes and from the right checkpoint, can succeed without a person."""
    return diagnosis.action in ("retry", "isolate", "rollback")


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values, as `espalier diagnose --json` prints them."""
    return {**asdict(diagnosis), "evidence": [one._asdict() for one in diagnosis.evidence]}
