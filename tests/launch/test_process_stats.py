import os
import signal
import subprocess
import sys
import time

from espalier.launch.ranks.process_stats import GONE, vital


def test_a_sleeper_a_worker_and_a_stopped_process_differ():
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    working = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 20
        while vital(sleeping.pid).state != "S" or vital(working.pid).cpu < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert vital(working.pid).state == "R"
        before = vital(sleeping.pid).cpu
        reading = subprocess.Popen([sys.executable, "-c", "f = open('/dev/zero', 'rb')\nwhile f.read(1 << 20): pass"])
        while vital(reading.pid).io < 1 << 26:
            assert time.monotonic() < deadline
        assert vital(sleeping.pid).io < 1 << 26
        reading.kill()
        reading.wait()
        os.kill(sleeping.pid, signal.SIGSTOP)
        while vital(sleeping.pid).state != "T":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert vital(sleeping.pid).cpu - before < 0.05
    finally:
        for process in (sleeping, working):
            process.kill()
            process.wait()
    assert vital(sleeping.pid) == GONE
