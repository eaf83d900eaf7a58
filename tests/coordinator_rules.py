"""A coordinator's rules and the jobs that talk to them, with a clock of our own: for tests."""

from holmes_ext.join.coordinator.coordinator import Coordinator
from holmes_ext.join.coordinator.lock_step import LockStepRounds
from holmes_ext.join.coordinator.reports import CheckedReport, Claim, DoneReport, Hello, ReadyReport

TIMEOUT = 30.0
SUM = 16 * "0"


class Run:
    """A coordinator and the jobs that talk to it, each with two fragments."""

    def __init__(self, *jobs, least=1, **outer):
        self.now, self.least = 100.0, least
        self.coordinator = Coordinator(self.now, policies=(LockStepRounds,))
        self.outer = {"limit": 10.0, "weight": "tokens", **outer}
        self.fragments = {}
        for job in jobs:
            self.hello(job)
        for job in jobs:
            assert self.enter(job)["verdict"] == "in"

    def hello(
        self, job, incarnation="1", agreed=None, fragments=((0, 7), (0, 7)), timeout=TIMEOUT, **more
    ):
        self.fragments.setdefault(job, [list(one) for one in fragments])
        agreed = agreed or {"outer": self.outer, "model": "abc"}
        claims = claims_of(self.fragments[job])
        least = more.pop("least", self.least)
        told = Hello(
            agreed,
            {"all": (0, 8, 0)},
            ("a:1",) * more.pop("ranks", 1),
            claims,
            least,
            timeout,
            **more,
        )
        return self.coordinator.hello(job, incarnation, told, self.now)

    def enter(self, job):
        return self.coordinator.enter(job, self.now)

    def ready(self, job, number, norm=1.0, tokens=100, salted="", why=""):
        salt_round = number if salted else 0
        report = ReadyReport(
            (number - 1) % 2,
            claims_of(self.fragments[job]),
            number,
            tokens,
            norm,
            why,
            salted,
            salt_round,
        )
        return self.coordinator.next_round("ready", job, report, self.now)

    def done(self, job, number, attempt=1, unreached=(), faults=None):
        return self.coordinator.done(
            job, DoneReport(number, attempt, tuple(unreached), faults or {}), self.now
        )

    def checked(self, job, number, attempt=1, check=1, digests=None, factors=None, gap=1.0):
        """digests: of what it got from each member, all the same unless told."""
        known = self.coordinator.state.rounds[number]
        names = [name for name, share in known.members.items() if share > 0]
        digests = dict.fromkeys(names, SUM) | (digests or {})
        factors = factors or {
            name: known.members[name] for name in names if name not in known.excluded
        }
        report = CheckedReport(number, attempt, check, digests, factors, gap)
        reply = self.coordinator.checked(job, report, self.now)
        if reply and reply["verdict"] == "commit":
            self.fragments[job][(number - 1) % 2] = [number, 1000 + number]
        return reply

    def end(self, number, *jobs, attempt=1):
        """From the exchange to the verdict."""
        for call in (self.done, self.checked):
            for job in jobs:
                call(job, number, attempt)
        return [self.checked(job, number, attempt) for job in jobs]

    def whole_round(self, number, *jobs, **ready):
        for job in jobs:
            self.ready(job, number, **ready)
        assert [reply["verdict"] for reply in self.end(number, *jobs)] == ["commit"] * len(jobs)


def claims_of(fragments):
    return tuple(
        Claim(version, "" if total is None else f"{total:016x}") for version, total in fragments
    )
