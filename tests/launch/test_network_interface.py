"""Hosts find the first one on an address where it really answers."""

from __future__ import annotations

import socket
import threading

import pytest

from espalier.machine import network_interface
from espalier.machine.network_interface import Address
from espalier.recipe.errors import UserError

OWN = [Address("eth0", "192.168.1.5", 24), Address("wg0", "10.8.0.2", 16), Address("lo", "127.0.0.1", 8)]


def test_addresses_are_those_of_interfaces_that_are_up_with_loopback_last() -> None:
    found = network_interface.addresses()
    assert found[-1].address.startswith("127.")
    assert all(one.prefix > 0 for one in found)


@pytest.mark.parametrize("interface", ["wg0", "10.8.0.2", "10.8.0.0/16", "10.0.0.0/8"])
def test_an_interface_is_meant_by_its_name_its_address_or_its_network(interface) -> None:
    assert network_interface.chosen(interface, OWN, "a") == [OWN[1]]


def test_an_interface_that_is_not_there_is_refused_with_the_host_and_what_it_has() -> None:
    with pytest.raises(UserError, match="host b") as caught:
        network_interface.chosen("eth7", OWN, "b")
    assert "eth0 (192.168.1.5)" in caught.value.why


def test_the_name_goes_before_the_near_and_the_near_before_the_far() -> None:
    first = [Address("docker0", "172.17.0.1", 16), *OWN]
    own = [Address("enp3s0", "192.168.1.9", 24)]
    assert network_interface.in_order(first, [], own) == ["192.168.1.5", "172.17.0.1", "10.8.0.2", "127.0.0.1"]
    assert network_interface.in_order(first, ["10.8.0.2"], own)[0] == "10.8.0.2"
    assert network_interface.in_order(first, ["127.0.1.1"], own)[0] == "192.168.1.5"


def test_only_the_one_who_knows_the_word_is_the_first_host(monkeypatch) -> None:
    monkeypatch.setattr(network_interface, "TRY_SECONDS", 0.3)
    met, found = network_interface.meeting(None, 0, "a")
    done = threading.Event()
    answering = threading.Thread(target=met.answer, args=(done.is_set,))
    answering.start()
    with met.socket, socket.create_server(("127.0.0.1", 0)) as silent:
        assert network_interface.reach([found[0].address], met.port, "0123456789abcdef", None) is None
        assert network_interface.reach(["127.0.0.1"], silent.getsockname()[1], met.word, None) is None
        assert network_interface.reach(["127.0.0.1"], met.port, met.word, OWN[2]) == ("127.0.0.1", "127.0.0.1")
        done.set()
        answering.join()


def test_who_comes_when_the_others_have_met_is_content_with_a_port_that_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        assert network_interface.reach(["127.0.0.1"], port, "", None) == ("127.0.0.1", "127.0.0.1")
    assert network_interface.reach(["127.0.0.1"], port, "", None) is None


def test_a_taken_port_is_named_with_its_host() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"launch.port = {port} cannot be used on host a") as caught:
            network_interface.meeting(None, port, "a")
        assert "listens" in caught.value.why


def test_an_interface_is_all_that_the_first_host_listens_on() -> None:
    met, found = network_interface.meeting("lo", 0, "a")
    with met.socket:
        assert met.socket.getsockname()[0] == found[0].address == "127.0.0.1"
    assert network_interface.interface_of("127.0.0.1", OWN) == "lo"
