"""How long a job's requests wait for a coordinator that does not answer."""

import contextlib
from types import SimpleNamespace

from waiting import await_, soon

from holmes_ext.join.coordinator import client as client_module
from holmes_ext.join.coordinator.client import CoordinatorClient, Heartbeat
from holmes_ext.join.rounds.coordinator_link import CoordinatorLink

ALONE = SimpleNamespace(rank=0, broadcast_from_rank_0=lambda value: value)


class Client:
    """A coordinator that does not answer; it counts requests, and says when it can be reached again."""

    def __init__(self, answers=False):
        self.asked = []
        self.looked = 0
        self.is_away = False
        self.answers = answers

    def ask(self, op, document, deadline):
        self.asked.append(deadline.seconds)
        raise TimeoutError(f"the coordinator did not answer {op!r}")

    def look_again(self):
        self.looked += 1
        self.is_away = True


def test_a_job_that_is_cut_off_waits_once_and_then_no_more():
    """F10: it waited 2 s in each round."""
    client = Client()
    link = CoordinatorLink(client, ALONE, patience_s=60.0, credentials=None)
    for _ in range(4):
        reply = link.ask("ready", {"round": 3})
        assert (reply["verdict"], reply["round"]) == ("void", 3) and "did not answer" in reply[
            "why"
        ]
    assert client.asked == [130.0] and client.looked == 1

    client.is_away = False  # it can be reached again
    link.ask("ready", {"round": 4})
    assert client.asked == [130.0, 2.0]


def test_a_coordinator_that_waits_for_other_jobs_is_not_away():
    client = Client(answers=True)
    link = CoordinatorLink(client, ALONE, patience_s=60.0, credentials=None)
    link.ask("ready", {"round": 1}), link.ask("ready", {"round": 2})
    assert client.asked == [130.0, 130.0] and client.looked == 0


def test_heartbeats_find_out_in_the_background_whether_the_coordinator_is_back(monkeypatch):
    monkeypatch.setattr(client_module, "HEARTBEAT_S", 0.02)
    channels = []
    is_cut = False

    def connect(deadline):
        if is_cut:
            raise OSError("no route")
        channels.append(SimpleNamespace(send=lambda *args: None, close=lambda: None))
        return channels[-1]

    heartbeat = Heartbeat(connect, dict)
    await_(lambda: heartbeat.is_connected)
    is_cut = True
    heartbeat.reconnect()
    assert not heartbeat.is_connected and len(channels) == 1
    is_cut = False
    await_(lambda: heartbeat.is_connected)
    assert len(channels) == 2
    heartbeat.close("")


def test_a_client_without_an_answer_says_so():
    place = SimpleNamespace(
        call=lambda *args: (_ for _ in ()).throw(OSError("no route")),
        address=SimpleNamespace(job="east", host="127.0.0.1", port=1),
    )
    client = CoordinatorClient(place, dict)
    with contextlib.suppress(TimeoutError):
        client.ask("ready", {}, soon(0.05))
    assert not client.answers and not client.is_away
