"""What a restarted job gets from its coordinator before its first step (early_contact.py)."""

from dataclasses import asdict

import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of, place_at, run_at
from waiting import await_, soon

from holmes_ext.join.address import JoinAddress
from holmes_ext.join.coordinator.client import CoordinatorClient
from holmes_ext.join.early_contact import begin_early_contact
from holmes_ext.join.identity.job_certificate import obtain_certificate
from holmes_ext.join.identity.private_files import write_private
from holmes_ext.join.peers.listening import OpenedPort
from holmes_ext.join.settings import parse_outer
from holmes_ext.options import options_from

SETTINGS = parse_outer("every=2,fragments=1,delay=0,compress=off,min=2,timeout=20")


@pytest.fixture
def environ(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def start(tmp_path, environ):
    """Return a function that begins the early contact of job east, after its first start or without one."""

    def begin(port, was_started=True, **options):
        address = JoinAddress("east", "127.0.0.1", port)
        invitation = tmp_path / "east.json"
        if not invitation.exists():
            text = run_at(port).invite("east", f"127.0.0.1:{port}").text()
            write_private(invitation, text, replaces=True)
        if was_started:
            obtain_certificate(address, str(invitation), environ, soon())
        given = options_from(
            join=f"east@127.0.0.1:{port}", join_invitation=str(invitation), **options
        )
        return begin_early_contact(address, given, environ)

    return begin


def fail():
    raise AssertionError("this is done again")


def test_a_restarted_job_joins_with_what_it_got_early(start):
    with coordinator(settings=SETTINGS) as server:
        early = start(server.port)
        assert early.settings(fail) == asdict(SETTINGS)
        assert early.port(fail).address.startswith("127.0.0.1:")
        assert early.channel.result(10).idle()

        def train(job, contact):
            model = torch.nn.ParameterList([torch.zeros(8)])
            loop = joined_of(model, job, server.port, SETTINGS, early=contact)
            used = loop.rounds.links.routes.address
            loop.begin()
            loop.after_step(1)
            loop.after_step(1)
            loop.end()
            return used

        used = in_threads(
            {"east": lambda: train("east", early), "west": lambda: train("west", None)}
        )
        assert used["east"] == early.port(fail).address
        assert any("round 1: commit (east 0.50, west 0.50)" in line for line in server.told)


def test_a_job_that_starts_for_the_first_time_contacts_nobody_early(start):
    with coordinator(settings=SETTINGS) as server:
        assert start(server.port, was_started=False) is None


def test_what_fails_early_is_done_again(start):
    with coordinator(settings=SETTINGS) as server:
        port = server.port
        start(port).settings(fail)
    early = start(port, was_started=False)  # its certificate is kept; nobody listens any more
    assert early.settings(lambda: {"read": "now"}) == {"read": "now"}
    client = CoordinatorClient(place_at("east", port), dict, early.incarnation)
    client.connect_early(early.channel)
    assert client._take_early_channel() is None


def test_a_connection_that_the_coordinator_has_closed_is_not_used(start):
    with coordinator(settings=SETTINGS) as server:
        early = start(server.port)
        early.channel.result(10)
    client = CoordinatorClient(place_at("east", server.port), dict, early.incarnation)
    client.connect_early(early.channel)
    await_(lambda: not early.channel.result().idle(), 10, "the end of the connection")
    assert client._take_early_channel() is None


def test_old_settings_are_read_again(start):
    with coordinator(settings=SETTINGS) as server:
        early = start(server.port)
        early.settings(fail)
        early._settings_valid_until = 0.0
        assert early.settings(lambda: None) is None


def test_a_port_that_the_user_gives_is_opened_at_the_first_step(start):
    with coordinator(settings=SETTINGS) as server:
        port = OpenedPort(None, "")
        assert start(server.port, join_ports="none").port(lambda: port) is port
