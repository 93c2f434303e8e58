"""The cause, the action and the advice are those of a log's own line, and a node is isolated for hardware alone."""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.ops import diagnosis, root_cause, rules
from espalier.ops.diagnosis import Means
from espalier.ops.log_scan import line_labels
from espalier.ops.taxonomy import INFRASTRUCTURE, REASONS, Diagnosis

OPS = Path(__file__).parents[1] / "ops"
LOGS: list[dict[str, Any]] = [
    log
    for name in ("infrastructure", "software", "tricky", "advice", "fresh")
    for log in tomllib.loads((OPS / f"logs-{name}.toml").read_text(encoding="utf-8"))["log"]
]
ACTIONS = [line.split(" <- ", 1) for line in (OPS / "actions.txt").read_text(encoding="utf-8").splitlines()]
HEALTHY = (OPS / "healthy.txt").read_text(encoding="utf-8").splitlines()


def of(text: str) -> Diagnosis:
    return diagnosis.of_case(diagnosis.of_text(text.encode()), Means())


MISMATCHES = {
    "device-assert": (
        "../aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [84,0,0], thread: [96,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed.\nRuntimeError: CUDA error: device-side assert triggered\n",
        "token id or label that is out of range",
    ),
    "driver-too-old": (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
        "driver by downloading and installing a new version.\n",
        "newer NVIDIA driver",
    ),
    "gated": (
        "huggingface_hub.errors.GatedRepoError: 401 Client Error.\nCannot access gated repo for url "
        "https://example.invalid/acme/secret-8b. Access to model acme/secret-8b is restricted. You must have access "
        "to it and be authenticated to access it. Please log in.\n",
        "ask for access .* log in",
    ),
    "no-kernel-image": (
        "step 1 loss 10.9\nRuntimeError: CUDA error: no kernel image is available for execution on the device\n",
        "built for this GPU",
    ),
    "undefined-symbol": (
        "ImportError: /env/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: "
        "_ZN3c104cuda9SetDeviceEi\n",
        "flash-attn.* again for this torch",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_version_an_access_or_an_id_stops_with_advice_of_its_own(name: str) -> None:
    text, advice = MISMATCHES[name]
    found = of(text)
    assert found.action == "stop"
    assert re.search(advice, found.advice)
    assert found.category != INFRASTRUCTURE


@pytest.mark.parametrize(
    ("text", "reason", "action"),
    [
        ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shm.\n"
         "RuntimeError: DataLoader worker (pid 4021) is killed by signal: Bus error.\n", "Dataloader Killed", "retry"),
        ("step 88010 loss 2.30\nslurmstepd: error: *** STEP 771203.0 ON gpu-a14 CANCELLED AT 2026-10-02T09:00:21 DUE "
         "TO TIME LIMIT ***\n", "No Failure", "retry"),
        ("step 500 loss 3.1\nslurmstepd: error: Detected 1 oom_kill event in StepId=90121.0. Some of the step tasks "
         "have been OOM Killed.\nsrun: error: node017: task 3: Out Of Memory\n", "Out of Memory Error", "retry"),
        ("OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 2, reducing to 1\nException: Current loss scale "
         "already at minimum - cannot decrease scale anymore. Exiting run.\n", "Loss Anomaly", "rollback"),
        ("RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n",
         "Connection Error", "retry"),
    ],
)  # fmt: skip
def test_what_was_right_stays_right(text: str, reason: str, action: str) -> None:
    assert (of(text).reason, of(text).action) == (reason, action)


@pytest.mark.parametrize("log", [log for log in LOGS if "advice" in log], ids=lambda log: str(log["name"]))
def test_the_advice_is_that_of_the_line(log: dict[str, Any]) -> None:
    assert re.search(log["advice"], of(log["text"]).advice)


@pytest.mark.parametrize(("action", "text"), ACTIONS, ids=[text[:40] for _, text in ACTIONS])
def test_a_line_calls_for_its_action(action: str, text: str) -> None:
    assert of(text.replace("\\n", "\n").replace("\\\\", "\\")).action == action


# --- isolation -----------------------------------------------------------------------------------------------------

HARDWARE = re.compile(
    r"Xid|ECC|EDAC|fallen off the bus|NVLink|NVSwitch|\blink\b.{0,20}down|Machine check|mce:|I/O error|Node failure|"
    r"NODE.FAIL|NodeNotReady|not respond|unreachable|lost communication|vendor err|ibv_|port error|panic|"
    r"critical temperature|heartbeat|NIC Link|Cable error|transport retry|GSP|reboot|lockup|ib0|UE memory|"
    r"medium error|-fs error|nvme\d: controller",
    re.IGNORECASE,
)
"""Words of drivers, kernels and schedulers about machines, listed without looking at the rules."""
SOFTWARE = [line for log in LOGS for line in log["text"].splitlines() if line.strip() and not HARDWARE.search(line)]
SOFTWARE = sorted({*SOFTWARE, *(line for line in HEALTHY if not HARDWARE.search(line))})


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_no_log_without_a_line_about_hardware_isolates_a_node(seed: int) -> None:
    lines = random.Random(seed).sample(SOFTWARE, 20)
    assert of("\n".join(lines)).action != "isolate"


def test_no_line_about_software_alone_isolates_a_node() -> None:
    assert len(SOFTWARE) > 400
    assert [line for line in SOFTWARE if of(f"step 1\n{line}\n").action == "isolate"] == []


@pytest.mark.parametrize("reason", [reason for reason, info in REASONS.items() if info.action == "isolate"])
def test_a_rule_that_isolates_without_hardware_restarts_instead(reason: str) -> None:
    entry = {"id": "odd", "patterns": ["flux"], "reason": reason, "role": "root"}
    for more, action in (({}, "retry"), ({"role": "hardware"}, "isolate"), ({"action": "isolate"}, "retry")):
        rule = rules.make(entry | more, "here")
        lines = line_labels.parse({1: "flux is out"})
        cause = root_cause.choose(root_cause.findings(lines, (rule,)), [])
        assert cause is not None
        assert diagnosis._action(cause)[0] == action


# --- harmless lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", HEALTHY)
def test_a_line_that_looks_alike_is_no_failure(line: str) -> None:
    assert of(f"step 1 loss 3.0\n{line}\nstep 2 loss 2.9\n").action == "none"


def test_warnings_of_a_job_that_died_of_something_else_are_not_its_cause() -> None:
    warning = "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)"
    assert of(f"{warning}\nKeyError: 'loss'\n").reason == "Key Error"
    assert of(f"{warning}\nRuntimeError: No CUDA GPUs are available\n").reason == "Version Mismatch"
    assert of(f"{warning}\n").reason == "Version Mismatch"
