"""What a failed rank's log may say to the restart policy, and what it may not."""

import signal
import socket
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.launch.resilience import restart_advice
from espalier.ops import diagnosis
from espalier.train.failure import Failure, RestartBudget, kind_of


def crash(raised, message, step=0):
    return Failure(kind_of(raised, step), 1, f"Rank 1 failed: {raised}: {message}", "", step, raised)


def ruled(failure, log, position, seconds=60.0):
    """With time enough on a busy machine."""
    return restart_advice.of(failure, log, position, seconds)


def log_of(folder, *lines):
    path = folder / "rank-1.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def traceback(*last):
    return ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    go()", *last)


SIZES = "Error(s) in loading state_dict for Gpt: size mismatch for head.weight"


def test_the_end_of_the_log_names_reason_category_and_the_line(tmp_path):
    log = log_of(tmp_path, "step 1 loss 2.0", *traceback("ModuleNotFoundError: No module named 'apex'"))
    found = ruled(crash("ModuleNotFoundError", "No module named 'apex'"), log, 0)
    assert (found.category, found.reason, found.action) == ("Script", "Import Error", "stop")
    assert "apex" in found.root


def test_without_a_log_the_error_itself_is_diagnosed():
    found = ruled(crash("RuntimeError", "CUDA error: uncorrectable ECC error encountered", 9), None, 0)
    assert (found.reason, found.action, found.ground) == ("ECC Error", "isolate", "retry")
    assert found.suspect == socket.gethostname(), "the log names no host, so it is this one"


def test_what_an_earlier_attempt_wrote_is_not_read(tmp_path):
    log = log_of(tmp_path, *traceback("KeyError: 'mask'"))
    assert ruled(Failure("killed", 1, "Rank 1 was killed (SIGKILL)."), log, log.stat().st_size).reason == "Unknown"
    assert ruled(Failure("killed", 1, "Rank 1 was killed (SIGKILL)."), log, 0).reason == "Key Error"


def test_reasons_of_nccl_are_given_only_where_ranks_meet_over_it(tmp_path):
    hang = Failure("hang", 1, "Rank 1 hangs.")
    assert (ruled(hang, None, 0).reason, restart_advice.of(hang, None, 0, 60.0, nccl=False).reason) == (
        "NCCL Timeout Error",
        "Hang",
    )
    log = log_of(tmp_path, "RuntimeError: [gloo] Timed out waiting 60000ms for recv operation to complete")
    lost = Failure("lost", 1, "Rank 1 waited 60 s.")
    assert ruled(lost, log, 0).reason == "NCCL Timeout Error"
    found = restart_advice.of(lost, log, 0, 60.0, nccl=False)
    assert found.reason == "Hang"
    assert "Timed out waiting" in found.root


@pytest.mark.parametrize(
    ("kind", "reason", "action"),
    [
        ("anomaly", "Loss Anomaly", "rollback"),
        ("hang", "NCCL Timeout Error", "isolate"),
        ("user", "Argument Error", "stop"),
        ("stopped", "Unknown", "retry"),
        ("signal", "Unknown", "retry"),
    ],
)
def test_failures_that_leave_no_line_are_named_by_their_kind_and_steer_nothing(tmp_path, kind, reason, action):
    log = log_of(tmp_path, "Current thread 0x00007f (most recent call first):", '  File "train.py", line 3 in wait')
    found = ruled(Failure(kind, 1, "Something."), log, 0)
    assert (found.reason, found.action, found.ground) == (reason, action, "")


@pytest.mark.parametrize(
    ("raised", "message", "said", "ground"),
    [
        ("RuntimeError", SIZES, None, "stop"),
        ("RuntimeError", "odd shape", None, ""),  # a class alone
        ("RuntimeError", "something else", f"WARNING: {SIZES}", ""),  # not what ended the rank
        ("OSError", "[Errno 28] No space left on device", None, ""),  # may be freed
        ("RuntimeError", "NCCL error: remote process exited", None, "retry"),
    ],
)
def test_only_grounds_steer(tmp_path, raised, message, said, ground):
    lines = [said] if said else []
    log = log_of(tmp_path, *lines, *traceback(f"{raised}: {message}"))
    assert ruled(crash(raised, message), log, 0).ground == ground


def test_a_script_error_is_not_tried_again_and_one_of_the_machine_is(tmp_path):
    log = log_of(tmp_path, *traceback(f"RuntimeError: {SIZES}"))
    assert [decided(RestartBudget(), crash("RuntimeError", SIZES), log).restart] == [False]
    message = "NCCL error: remote process exited"
    log, budget = log_of(tmp_path, *traceback(f"RuntimeError: {message}")), RestartBudget()
    assert [decided(budget, crash("RuntimeError", message), log).restart for _ in range(5)] == [True] * 3 + [False] * 2


def test_code_that_has_made_a_step_is_never_stopped_by_a_diagnosis(tmp_path):
    log = log_of(tmp_path, *traceback(f"RuntimeError: {SIZES}"))
    assert decided(RestartBudget(), crash("RuntimeError", SIZES, step=7), log).restart
    budget = RestartBudget()
    assert decided(budget, Failure("killed", 0, "Rank 0 was killed.", step=7), None).restart
    assert decided(budget, crash("RuntimeError", SIZES), log).restart


def decided(budget, failure, log):
    found = ruled(failure, log, 0)
    return budget.decide(replace(failure, category=found.category, reason=found.reason, ground=found.ground))


def test_an_enormous_log_takes_no_longer_than_a_small_one(tmp_path):
    log = tmp_path / "rank-1.log"
    log.write_bytes(b"step 1 loss 2.0 ok\n" * 2_000_000 + "\n".join(traceback("KeyError: 'mask'")).encode())
    restart_advice.ready()
    begun = time.process_time()
    assert ruled(crash("KeyError", "'mask'"), log, 0).reason == "Key Error"
    assert time.process_time() - begun < restart_advice.SECONDS


def test_what_takes_too_long_is_given_up_and_anothers_alarm_is_kept(monkeypatch):
    monkeypatch.setattr(diagnosis, "of_text", lambda text: time.sleep(30))
    before, left = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    begun = time.monotonic()
    found = ruled(crash("KeyError", "'mask'"), None, 0, seconds=0.05)
    assert (found.reason, found.action, found.ground) == ("Unknown", "retry", "")
    assert time.monotonic() - begun < 25, "it would take 30"
    assert signal.getsignal(signal.SIGALRM) == before
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (left > 0)


def test_a_diagnosis_that_fails_ends_nothing(monkeypatch):
    def broken(text):
        raise IndexError("bad rule")

    monkeypatch.setattr(diagnosis, "of_text", broken)
    assert ruled(crash("KeyError", "'mask'"), None, 0).root == "not diagnosed: bad rule"


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=3000), st.sampled_from(["killed", "exit", "hang", "stopped", "lost", "signal", "anomaly"]))
def test_whatever_a_log_says_a_rank_that_raised_nothing_is_started_again(tmp_path_factory, text, kind):
    log = tmp_path_factory.mktemp("log") / "rank-1.log"
    log.write_bytes(text + f"\nImportError: no\nKeyError: 'a'\nRuntimeError: {SIZES}\n".encode())
    failure = Failure(kind, 1, "Rank 1 was killed (SIGKILL).")
    assert decided(RestartBudget(), failure, log).restart
