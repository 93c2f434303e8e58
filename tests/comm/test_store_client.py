"""No connection waits for a name server, and whoever needs one still gets its answer."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from espalier.comm import store_client
from espalier.recipe import process_environment

SILENT = f"127.0.77.{1 + int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:])}"
"""Where a name server listens that answers nobody; each worker has its own."""

CONNECT = """
import os, socket, sys
from espalier.comm import store_client
store_client.own_process()
server = store_client.serve()
client = store_client.connect("127.0.0.1", server.port, 20.0)
store_client.clone(client).set("key", "value")
assert server.get("key") == b"value"
"""
PLAIN = """
from torch._C._distributed_c10d import TCPStore
TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
"""
WAIT = """
import os, sys
from datetime import timedelta
from espalier.recipe import process_environment
from espalier.comm import store_client
store_client.own_process()
if sys.argv[1:] == ["quiet"]:
    process_environment.settle()
server = store_client.serve()
client = store_client.connect("127.0.0.1", server.port, 20.0)
try:
    client.wait(["nobody sets this"], timedelta(seconds=0.2))
except Exception:
    pass
"""
AFTERWARDS = """
import socket
try:
    socket.getaddrinfo("host.example", None)
except socket.gaierror:
    pass
"""


@pytest.fixture
def asked():
    """The names that a silent name server was asked for."""
    names = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        try:
            server.bind((SILENT, 53))
        except OSError as error:
            pytest.skip(f"no name server can be played here: {error}")

        def listen():
            while data := server.recv(512):
                names.append(data)

        thread = threading.Thread(target=listen)
        thread.start()
        yield names
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", (SILENT, 53))
        thread.join()


def run(code, folder, *arguments):
    """Runs it where that name server is the only one."""
    if shutil.which("unshare") is None or os.geteuid():
        pytest.skip("needs root and unshare")
    (folder / "resolv.conf").write_text(f"nameserver {SILENT}\noptions timeout:1 attempts:1\n")
    (folder / "nsswitch.conf").write_text("hosts: files dns\n")
    (folder / "code.py").write_text(code)
    mounts = "".join(f"mount --bind {folder}/{name} /etc/{name} && " for name in ("resolv.conf", "nsswitch.conf"))
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f"{mounts}exec {sys.executable} {folder}/code.py {' '.join(arguments)}",
    ]
    subprocess.run(command, check=True, timeout=100, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_connecting_asks_no_name_server(asked, tmp_path):
    run(CONNECT, tmp_path)
    assert asked == []


USERS = """
import os, sys
import torch.distributed as dist
registered = []
os.register_at_fork = lambda **handlers: registered.append(handlers)
from espalier import comm
from espalier.comm import store_client
store_client._look_up = None  # whoever switches raises
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
channel = comm.connect(store, 0, 1, timeout=20.0)
store_client.clone(channel.get_group_store()).set("key", "value")
comm.disconnect()
assert not [one for one in registered if "store_client" in str(one)], registered
"""


def test_a_users_own_process_keeps_its_name_service_and_its_forks(tmp_path):
    (tmp_path / "users.py").write_text(USERS)
    done = subprocess.run(
        [sys.executable, tmp_path / "users.py"], check=False, timeout=100, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_torch_alone_asks_for_each_peer(asked, tmp_path):
    run(PLAIN, tmp_path)
    assert any(b"in-addr" in one for one in asked), "or the test above shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [True, False])
def test_what_c10d_warns_of_asks_too_unless_it_is_quiet(asked, tmp_path, quiet, monkeypatch):
    monkeypatch.delenv(process_environment.QUIET[0], raising=False)
    run(WAIT, tmp_path, *(["quiet"] if quiet else []))
    assert bool(asked) != quiet


@pytest.mark.slow
def test_names_are_asked_for_again_once_it_is_connected(asked, tmp_path):
    run(CONNECT + AFTERWARDS, tmp_path)
    assert asked
    assert all(b"\x04host\x07example" in one for one in asked)


@pytest.mark.slow
def test_a_fork_while_somebody_connects_finds_names_as_before(asked, tmp_path):
    fork = "pid = os.fork() or os._exit(0 if not exec(AFTERWARDS) else 1)\nos.waitpid(pid, 0)\n"
    inside = f"{CONNECT}\nAFTERWARDS = {AFTERWARDS!r}\nwith store_client._connecting.to('127.0.0.1'):\n    "
    run(inside + fork.replace("\n", "\n    "), tmp_path)
    assert asked


@pytest.fixture
def looked_up(monkeypatch):
    ways = []
    monkeypatch.setattr(store_client, "_look_up", ways.append)
    return ways


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("hosts:  files mdns4_minimal [NOTFOUND=return] dns\n", "files mdns4_minimal [NOTFOUND=return] dns"),
        ("# hosts: none\npasswd: files\nhosts: dns files # both\n", "dns files"),
        ("passwd: files\n", "files dns"),
        (None, "files dns"),
    ],
)
def test_the_machines_own_way_is_taken_up_again(text, how, looked_up, tmp_path, monkeypatch):
    monkeypatch.setattr(store_client, "_SWITCH", tmp_path / "nsswitch.conf")
    if text is not None:
        (tmp_path / "nsswitch.conf").write_text(text)
    store = store_client.serve()
    assert looked_up == ["files", how]
    PrefixStore("a", PrefixStore("b", store)).set("key", "value")
    assert store_client.clone(PrefixStore("a", PrefixStore("b", store))).get("key") == b"value"
    assert looked_up == ["files", how] * 2


def test_who_is_found_by_a_name_server_alone_is_asked_for(looked_up, monkeypatch):
    def nobody(*_):
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with store_client._connecting.to("node0.cluster"):
        assert len(looked_up) == 2


def test_the_last_of_several_threads_switches_back(looked_up):
    alone = store_client._connecting.to
    with alone("127.0.0.1"):
        with alone("127.0.0.1"):
            pass
        assert looked_up == ["files"]
    assert len(looked_up) == 2


def test_a_fork_waits_until_nobody_connects(looked_up):
    begun, order = threading.Event(), []

    def connects():
        with store_client._connecting.to("127.0.0.1"):
            begun.set()
            time.sleep(0.5)
            order.append("connected")

    thread = threading.Thread(target=connects)
    thread.start()
    begun.wait()
    pid = os.fork()
    if pid == 0:
        with store_client._connecting.to("127.0.0.1"):
            os._exit(0)
    order.append("forked")
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert order == ["connected", "forked"]


def test_a_store_of_one_process_is_taken_as_it_is(looked_up):
    store = HashStore()
    store_client.clone(store).set("key", "value")
    assert store.get("key") == b"value"
