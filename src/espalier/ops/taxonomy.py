"""Failure taxonomy: why training jobs fail, by a six-month study, what each reason calls for, and `Diagnosis`.

After Hu et al., "Characterization of Large Language Model Development in the Datacenter" (Acme), NSDI 2024, arXiv
2403.07648: 29 reasons in three categories. Ours are `Version Mismatch`, `Hang`, `Loss Anomaly`, `No Failure`,
`Unknown`, and the actions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

Action = Literal["retry", "isolate", "rollback", "stop", "none"]
"""retry: bounded restart; isolate: test the nodes, leave out those that fail, restart; rollback: an earlier checkpoint,
and skip the data that followed it; stop: a person must change something first; none: nothing has failed."""

ACTIONS: tuple[Action, ...] = ("retry", "isolate", "rollback", "stop", "none")

INFRASTRUCTURE, FRAMEWORK, SCRIPT, OTHER = "Infrastructure", "Framework", "Script", "Other"
UNKNOWN, NO_FAILURE, LOSS_ANOMALY, HANG = "Unknown", "No Failure", "Loss Anomaly", "Hang"


class ReasonInfo(NamedTuple):
    """What is known of a reason: its category, what to do about it unless a rule says otherwise, in one word and in
    a sentence."""

    category: str
    action: Action
    advice: str


_ADVICE: dict[tuple[str, Action], dict[str, str]] = {
    (INFRASTRUCTURE, "isolate"): {
        "NVLink Error": "drain the node and test its NVLinks: nvidia-smi nvlink -e, dcgmi diag -r 3",
        "CUDA Error":
            "test the GPU (dcgmi diag -r 3); CUDA_LAUNCH_BLOCKING=1 finds the kernel if it comes back elsewhere",
        "Node Failure": "leave the node out and start again from the newest checkpoint",
        "ECC Error": "drain the node; nvidia-smi -q -d ECC,ROW_REMAPPER tells whether the GPU must be replaced",
        "Network Error": "test the link or the card (ibstat, ethtool, dmesg) before the node is used again",
        "NCCL Timeout Error":
            "test the node of the rank that did not arrive; its stack tells whether it computed, loaded or hung",
        "NCCL Remote Error": "look at the rank that went away first: its own log, its node's dmesg",
    },
    (INFRASTRUCTURE, "retry"): {
        "Connection Error": "try again; if it stays, check name, port and firewall of the service",
        "S3 Storage Error": "try again with longer pauses between requests; check bucket, endpoint and credentials",
    },
    (FRAMEWORK, "retry"): {
        "Dataloader Killed": "fewer workers, smaller prefetch, more host or shared memory (--shm-size)",
    },
    (FRAMEWORK, "stop"): {
        "Attribute Error": "correct the code, or the version of the library it was written for",
        "Out of Memory Error":
            "smaller micro-batch, recompute activations, or shard more (espalier plan says what fits)",
        "Runtime Error": "correct what the message names",
        "Assertion Error": "make the configuration meet what the assertion demands",
        "Value Error": "correct the value that the message names",
        "Zero Division Error": "find out why the divisor is zero: an empty batch, split or interval",
        "Model Loading Error":
            "compare the checkpoint with the model's configuration, and its files with their checksums",
        "Version Mismatch": "install releases that belong together, on every node",
        "Dataset Loading Error": "build the data set or its index again, and look at the file that is named",
    },
    (SCRIPT, "stop"): {
        "File Not Found Error": "correct the path, or mount it on every node",
        "OS Error": "free space, raise the limit, or mount the file system again",
        "Type Error": "correct the call",
        "Name Error": "correct the name",
        "Permission Error": "give the job's user access, or name another place",
        "Import Error": "install the module in the environment that every node uses",
        "Key Error": "correct the key, or the configuration that lacks it",
        "Syntax Error": "correct the line",
        "Argument Error": "correct the command line",
        "Called Process Error": "run the command that failed by hand",
        "Index Error": "find the index that is out of range: often a token or label beyond the table",
    },
    (OTHER, "isolate"): {
        HANG: "its stacks tell where it stood still; test its node if it comes back there",
    },
    (OTHER, "rollback"): {
        LOSS_ANOMALY: "go back to a checkpoint before that line, skip the data since, look at the learning rate",
    },
    (OTHER, "none"): {
        NO_FAILURE: "nothing to do",
    },
    (OTHER, "retry"): {
        UNKNOWN: "read the evidence; a rule of your own (--rules) names it the next time",
    },
}  # fmt: skip
"""By category and action: what to do about each reason, in a sentence."""
REASONS = {
    name: ReasonInfo(category, action, advice)
    for (category, action), reasons in _ADVICE.items()
    for name, advice in reasons.items()
}


class EvidenceLine(NamedTuple):
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
    evidence: tuple[EvidenceLine, ...] = ()
    advice: str = ""
    source: str = "rules"


def called(file: str, reason: str, **more: Any) -> Diagnosis:
    """The diagnosis of the log `file` by its reason; category, action and advice are the reason's unless in `more`."""
    kind = REASONS[reason]
    plain = Diagnosis(file, kind.category, reason, None, None, None, kind.action, (), kind.advice)
    return replace(plain, **more)


def restart_helps(diagnosis: Diagnosis) -> bool:
    """Whether starting again, on good nodes and from the right checkpoint, can succeed without a person."""
    return diagnosis.action in ("retry", "isolate", "rollback")


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values, as `espalier diagnose --json` prints them."""
    return {**asdict(diagnosis), "evidence": [line._asdict() for line in diagnosis.evidence]}
