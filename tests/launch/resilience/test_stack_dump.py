from espalier.launch.resilience.stack_dump import culprit

WAITING = """Thread 0x0000000000000001 (most recent call first):
  File "/x/espalier/resilience/heartbeat.py", line 80 in _beat

Current thread 0x0000000000000002 (most recent call first):
  File "/x/espalier/comm/work.py", line 40 in wait
  File "/x/espalier/trainer.py", line 40 in train_step
  File "/x/espalier/launch/ranks/rank_process.py", line 10 in _live
"""
OWN = """Thread 0x0000000000000001 (most recent call first):
  File "/x/espalier/comm/flight_recorder.py", line 80 in _run

Current thread 0x0000000000000002 (most recent call first):
  File "/y/mine.py", line 7 in loss
  File "/x/espalier/trainer.py", line 40 in train_step
  File "/x/espalier/launch/ranks/rank_process.py", line 10 in _live
"""


def test_the_one_that_does_not_wait_is_named_with_its_place():
    assert culprit({0: WAITING, 3: OWN, 1: WAITING}) == (3, "/y/mine.py, line 7, in loss")


def test_nobody_is_named_where_all_wait_or_several_do_not():
    assert culprit({0: WAITING, 1: WAITING}) is None
    assert culprit({0: OWN, 1: OWN}) is None
    assert culprit({0: "", 1: OWN[:60]}) is None
