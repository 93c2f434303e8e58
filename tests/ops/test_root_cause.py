"""Causes are told from what follows from them: across ranks, in chains, by clock, and from what was survived."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.ops import root_cause
from espalier.ops.log_scan import line_labels
from espalier.ops.log_scan.scan import Loss
from espalier.ops.rules import built_in_rules


def chosen(text, losses=(), ranks=1):
    parsed = line_labels.parse(dict(enumerate(text.split("\n"), 1)))
    return root_cause.choose(root_cause.findings(parsed, built_in_rules()), losses, ranks)


ROOT = "[rank3]: KeyError: 'k'"
CASCADES = (
    "[rank1]:[E1 x.cpp:1] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
    "[rank2]: RuntimeError: Connection closed by peer [10.0.0.1]:1",
    "[rank0]: BrokenPipeError: [Errno 32] Broken pipe",
    "[rank4]: ConnectionResetError: [Errno 104] Connection reset by peer",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "W Sending process 12 closing signal SIGTERM",
    "[rank5]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "srun: error: n1: task 3: Exited with exit code 1",
)


@given(st.permutations([ROOT, *CASCADES]))
def test_a_root_is_chosen_among_cascades_in_any_order(order):
    cause = chosen("\n".join(order))
    assert cause is not None
    assert cause.root.line.raw == ROOT
    assert cause.root.rank == 3


@pytest.mark.parametrize(
    ("cascade", "reason"),
    [(CASCADES[0], "NCCL Timeout Error"), (CASCADES[1], "Connection Error"), (CASCADES[6], "NCCL Remote Error")],
)
def test_a_cascade_alone_is_what_is_known(cascade, reason):
    cause = chosen(cascade)
    assert cause is not None
    assert cause.named.rule.reason == reason


CHAIN = """Traceback (most recent call last):
  File "a.py", line 1, in f
{first}

{link}

Traceback (most recent call last):
  File "b.py", line 2, in g
{second}"""
LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


@pytest.mark.parametrize("link", LINKS)
def test_of_a_chain_the_first_exception_counts(link):
    cause = chosen(CHAIN.format(first="KeyError: 'k'", link=link, second="ValueError: no config"))
    assert cause is not None
    assert (cause.named.rule.reason, cause.root.line.number) == ("Key Error", 3)


@pytest.mark.parametrize("link", LINKS)
def test_of_a_chain_a_later_exception_counts_where_it_says_more(link):
    second = "OSError: Can't load tokenizer for 'x/y'"
    cause = chosen(CHAIN.format(first="KeyError: 'k'", link=link, second=second))
    assert cause is not None
    assert cause.named.rule.reason == "Model Loading Error"


def test_chains_of_interleaved_ranks_are_kept_apart():
    one = CHAIN.format(first="KeyError: 'k'", link=LINKS[0], second="ValueError: x").split("\n")
    other = CHAIN.format(first="TypeError: t", link=LINKS[1], second="RuntimeError: y").split("\n")
    mixed = [
        text
        for pair in zip([f"[rank0]: {a}" for a in one], [f"[rank1]: {b}" for b in other], strict=True)
        for text in pair
    ]
    found = root_cause.findings(line_labels.parse(dict(enumerate(mixed, 1))), built_in_rules())
    chains = {one.rank: {other.chain for other in found if other.rank == one.rank} for one in found}
    assert all(len(chain) == 1 and -1 not in chain for chain in chains.values())
    assert chains[0] != chains[1]


def test_what_the_job_went_on_after_is_no_cause():
    text = "NVRM: Xid (PCI:1): 63, pid=1, row remap pending\nok\nAttributeError: x"
    went_on = [Loss(2, 2.0, b"")] * root_cause.WENT_ON
    assert chosen(text).named.rule.reason == "ECC Error"
    assert chosen(text, went_on).named.rule.reason == "Attribute Error"
    assert chosen(text, went_on, ranks=2).named.rule.reason == "ECC Error"
    lost = [Loss(2, float("nan"), b"")] * root_cause.WENT_ON
    assert chosen(text, lost).named.rule.reason == "ECC Error"


def test_the_machine_outweighs_programs():
    assert chosen("RuntimeError: odd\nsrun: error: Node failure on n7").root.node == "n7"


def test_a_quiet_line_is_a_cause_only_where_nothing_louder_is():
    assert chosen("WARNING No space left on device\nERROR KeyError: 'k'").named.rule.reason == "Key Error"
    assert chosen("WARNING No space left on device").named.rule.reason == "OS Error"


def test_a_kill_for_memory_is_the_loaders_where_a_loader_died_of_it():
    text = "kernel: Out of memory: Killed process 7 (python)\n"
    text += "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly"
    cause = chosen(text)
    assert (cause.named.rule.reason, cause.root.line.number) == ("Dataloader Killed", 1)


def test_noise_covers_the_lines_it_brings():
    text = (
        'Exception ignored in: <function f>\nTraceback (most recent call last):\n  File "a", line 1\nAssertionError: x'
    )
    assert chosen(text) is None


def test_after_its_work_a_job_may_die_noisily():
    done = "training finished\n"
    assert chosen(done + "RuntimeError: Connection closed by peer") is None
    thread = 'Exception in thread T:\nTraceback (most recent call last):\n  File "a", line 1\nFileNotFoundError: x'
    assert chosen(done + thread) is None
    bad = chosen(done + "RuntimeError: x\nE failed (exitcode: 1) local_rank: 0")
    assert bad is not None
    assert bad.named.rule.reason == "Runtime Error"
