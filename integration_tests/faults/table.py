"""Table of the faults that tests cause in a job on two emulated clusters, and of what the job must then do.

    cluster a    nodes a0 and a1, with InfiniBand
    cluster b    nodes b0 and b1, with RoCE

The launcher places ranks 0 to 3 on a0, b0, a1, b1. Holmes renumbers them, so that they are on a0, a1, b0, b1.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

#: Something done to the lab, and undone afterwards: (name of Lab's method, arguments, arguments of the
#: undoing).
Change = tuple[str, tuple, tuple]


def cable(node: str, nic: str) -> Change:
    """Pull the cable of a NIC: it has no carrier, and the port of its HCA goes down."""
    return ("set_link", (node, nic, False), (node, nic, True))


def silent(node: str, nic: str) -> Change:
    """Drop all packets of a NIC in the switch, while both ends see a link."""
    return ("set_silent", (node, nic, True), (node, nic, False))


def ip(node: str, line: str, undo: str) -> Change:
    return ("configure", (node, line), (node, undo))


def set_down(node: str, nic: str) -> Change:
    return ip(node, f"link set dev {nic} down", f"link set dev {nic} up")


def blackhole(node: str, address: str) -> Change:
    return ip(node, f"route add blackhole {address}/32", f"route del blackhole {address}/32")


def readdress(node: str, nic: str, old: str, new: str) -> tuple[Change, ...]:
    """Replace the IP address of a NIC.

    The old address is deleted first: a second address of the same subnet would be deleted with it.
    """
    gone = ip(node, f"address del {old}/16 dev {nic}", f"address add {old}/16 dev {nic}")
    return gone, ip(node, f"address add {new}/16 dev {nic}", f"address del {new}/16 dev {nic}")


def rate(node: str, nic: str, bps: int, normal: int) -> Change:
    return ("set_rate", (node, nic, bps), (node, nic, normal))


class Changes:
    """Changes made to the lab, which undo() takes back, the last one first."""

    def __init__(self, lab):
        self.lab = lab
        self.undo_calls = []  # (name of Lab's method, arguments)
        self.lock = threading.Lock()

    def do(self, changes):
        with self.lock:
            for method, arguments, undo in changes:
                getattr(self.lab, method)(*arguments)
                self.undo_calls.append((method, undo))

    def undo(self):
        with self.lock:
            while self.undo_calls:
                method, arguments = self.undo_calls.pop()
                getattr(self.lab, method)(*arguments)


#: Name of a NIC -> its name on the machine that replaces the node.
OTHER_NAMES = {"eth0": "enp1s0f0", "roce0": "ens6f1np1"}


def renamed(node: str) -> Change:
    return (
        "rename",
        (node, OTHER_NAMES, "mlx5_3"),
        (node, {new: old for old, new in OTHER_NAMES.items()}, "mlx5_0"),
    )


@dataclass(frozen=True)
class Fault:
    """A fault that a test causes in a job of the emulated cluster, and what the job must then do."""

    name: str
    says: tuple[str, ...] = ()  # patterns; each must match a line that the job prints
    status: int = 2  # exit status of all ranks except those in `gone`
    before: tuple[Change, ...] = ()  # changes to the emulated network before the job starts
    #: Changes to the emulated network when a rank has printed "step 2".
    during: tuple[Change, ...] = ()
    undo_during: str = ""  # pattern; when a line of the job matches it, the changes are undone
    #: Rank -> what goes wrong in its process, such as {"do": "kill", "when": "send"} (see tiny.py).
    ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    flags: tuple[str, ...] = ()  # further flags of the job
    env: dict[str, str] = field(default_factory=dict)  # further environment variables of the job
    gone: tuple[int, ...] = ()  # ranks that are killed or stopped, or end with another status
    silent: tuple[str, ...] = ()  # patterns that no line may match
    within_s: float = 120.0  # timeout against hangs; no measure of speed
    #: Runs before each merge. If False, the case is exhaustive (tests/selection.py).
    default: bool = True

    @property
    def grace_s(self) -> float:
        """Return how long the launcher lets other ranks run after a rank has failed, in seconds.

        It is short for faults after which the other ranks could only hang.
        """
        if self.during and self.gone:
            return 4.0
        if any(failure.get("do") == "stop" for failure in self.ranks.values()):
            return 10.0
        return 20.0


FAIL = ("--holmes-fallback", "fail")
SHORT = ("--holmes-timeout", "5")
B0, B1 = "10.77.0.3", "10.77.0.4"
ROCE0, ROCE1 = "10.101.0.3", "10.101.0.4"
MOVED = r"data group of ranks 2, 3 goes over ethernet on all its ranks"
B_PAIR = (
    r"node b0 .rank 2, roce0 .mlx5_0:1., 10.101.0.3. does not reach node b1 .rank 3, roce0 .mlx5_0:1., "
    r"10.101.0.4"
    r". over b, for the data group of ranks 2, 3"
)

AT_START = (
    Fault(
        "a fast NIC without link",
        (r"node b1: mlx5_0:1 is DOWN.*uses Ethernet instead",),
        0,
        (cable("b1", "roce0"),),
    ),
    Fault(
        "a fast NIC without link, fail",
        (r"node 'b1' of cluster 'b' has no roce NIC that is up",),
        2,
        (cable("b1", "roce0"),),
        flags=FAIL,
        default=False,
    ),
    Fault(
        "an InfiniBand NIC without link",
        (r"node a1: mlx5_0:1 is DOWN.*uses Ethernet instead",),
        0,
        (cable("a1", "ib0"),),
        default=False,
    ),
    Fault(
        "a fast NIC set down on its node",
        (B_PAIR, MOVED),
        0,
        (set_down("b1", "roce0"),),
        default=False,
    ),
    Fault(
        "a fast NIC set down on its node, fail",
        (B_PAIR, r"fix that, or use --holmes-fallback ethernet"),
        2,
        (set_down("b1", "roce0"),),
        flags=FAIL,
        default=False,
    ),
    Fault(
        "unreachable on its fast NIC alone",
        (B_PAIR + ".*(no answer to connect|No route)", MOVED),
        0,
        (silent("b1", "roce0"),),
    ),
    Fault(
        "unreachable on its fast NIC alone, fail",
        (B_PAIR,),
        2,
        (silent("b1", "roce0"),),
        flags=FAIL,
    ),
    Fault(
        "unreachable over InfiniBand alone",
        (
            r"node a0 .*ib0.*does not reach node a1 .*data group of "
            r"ranks 0, 1",
        ),
        0,
        (silent("a0", "ib0"),),
    ),
    Fault(
        "both fabrics silent",
        (r"a0 .*does not reach node a1.*b0 .*does not reach node b1",),
        0,
        (silent("a0", "ib0"), silent("b1", "roce0")),
        default=False,
    ),
    Fault("no route to the fast NIC", (B_PAIR, MOVED), 0, (blackhole("b0", ROCE1),), default=False),
    Fault(
        "no way back from the fast NIC",
        (B_PAIR, MOVED),
        0,
        (blackhole("b1", ROCE0),),
        default=False,
    ),
    Fault(
        "Ethernet does not reach between two nodes",
        (
            r"node b0 .rank 2, eth0, 10.77.0.3. does not reach node b1 .rank 3, eth0, 10.77.0.4.*fix its "
            r"cable",
        ),
        2,
        (blackhole("b0", B1),),
    ),
    Fault(
        "Ethernet answers in one direction",
        (
            r"node b0 .rank 2, eth0.*does not reach node b1 .*fix its "
            r"cable",
        ),
        2,
        (blackhole("b1", B0),),
        default=False,
    ),
    Fault(
        "Ethernet gone on a node",
        (r"1 of 4 ranks did not report within 5 s: rank 2",),
        2,
        (cable("a1", "eth0"),),
        flags=SHORT,
        default=False,
    ),
    Fault(
        "the fast NICs have each other's address",
        (),
        0,
        (*readdress("b0", "roce0", ROCE0, ROCE1), *readdress("b1", "roce0", ROCE1, ROCE0)),
        silent=("preflight",),
    ),
    Fault(
        "two nodes with one address",
        (r"b0 .*does not reach node b1 .*10.101.0.3", MOVED),
        0,
        readdress("b1", "roce0", ROCE1, ROCE0),
        default=False,
    ),
    Fault(
        "fast NICs in different subnets",
        (r"b0 .*does not reach node b1 .rank 3, roce0 .mlx5_0:1., 10.222.0.4", MOVED),
        0,
        readdress("b1", "roce0", ROCE1, "10.222.0.4"),
    ),
    Fault(
        "a fast NIC without an address",
        (r"not tried on b: b1 .mlx5_0:1. has no IP address",),
        0,
        (ip("b1", f"address del {ROCE1}/16 dev roce0", f"address add {ROCE1}/16 dev roce0"),),
    ),
    Fault(
        "Ethernet and fast NIC have each other's address",
        (r"did not report within 5 s: rank 3|cannot reach the job's store",),
        2,
        (*readdress("b1", "roce0", ROCE1, B1), *readdress("b1", "eth0", B1, ROCE1)),
        flags=SHORT,
        default=False,
    ),
    Fault(
        "preflight switched off, link silent",
        (
            r"communication failed; node b[01] .rank [23]. is lost at its roce0 .mlx5_0:1.: .*connect",
        ),
        1,
        (silent("b1", "roce0"),),
        flags=("--holmes-preflight", "off"),
        env={"GROUP_TIMEOUT_S": "6"},
        gone=(1, 3),
        default=False,
    ),
)

DISAGREE = (
    Fault(
        "another flag",
        (
            r"disagree on timeout .flag --holmes-timeout.: rank 0 on a0 has '300', rank 2 on a1 has '77'",
        ),
        ranks={"2": {"flags": ["--holmes-timeout", "77"]}},
        default=False,
    ),
    Fault(
        "another fallback",
        (r"disagree on fallback.*rank 3 on b1 has 'fail'",),
        ranks={"3": {"flags": list(FAIL)}},
        default=False,
    ),
    Fault(
        "preflight off on one rank",
        (r"disagree on preflight.*rank 1 on b0 has 'off'",),
        ranks={"1": {"flags": ["--holmes-preflight", "off"]}},
    ),
    Fault(
        "another variable",
        (r"disagree on HOLMES_DISABLE: rank 0 on a0 has '', rank 1 on b0 has 'overlap'",),
        ranks={"1": {"environ": {"HOLMES_DISABLE": "overlap"}}},
    ),
    Fault(
        "another plan",
        (r"disagree on (content of plan file|plan).*rank 2 on a1",),
        ranks={"2": {"flags": ["--holmes-plan", "{plan}"]}},
    ),
    Fault(
        "another version of holmes",
        (r"disagree on holmes_ext version: rank 0 on a0 has '.*', rank 3 on b1 has '9.9'",),
        ranks={"3": {"versions": {"holmes_ext": "9.9"}}},
    ),
    Fault(
        "another Python",
        (r"disagree on Python version: .* rank 2 on a1 has '3.8.0'",),
        ranks={"2": {"versions": {"python": "3.8.0"}}},
    ),
    Fault(
        "another torch",
        (r"disagree on installed frameworks: .* rank 2 on a1 has 'torch 1.0'",),
        ranks={"2": {"versions": {"frameworks": {"torch": "1.0"}}}},
    ),
    Fault(
        "patched differently",
        (
            r"the ranks are patched differently: .* 'on 9' .* on rank|patched differently: .* on rank .* 'on "
            r"9'",
        ),
        ranks={"2": {"versions": {"patches": "on 9"}}},
    ),
    Fault(
        "the first rank is patched differently",
        (r"the ranks are patched differently: .* is .* on rank .* and .* on rank",),
        ranks={"0": {"versions": {"patches": "on 9"}}},
    ),
    Fault(
        "a flag that does not exist",
        (r"rank 2 on a1: --holmes-fallbakc.*did you mean --holmes-fallback",),
        ranks={"2": {"flags": ["--holmes-fallbakc", "x"]}},
        default=False,
    ),
    Fault(
        "a plan that one rank cannot read",
        (r"rank 1 on b0: /nowhere/p.json: cannot be read",),
        ranks={"1": {"flags": ["--holmes-plan", "/nowhere/p.json"]}},
        default=False,
    ),
)

AWAY = (
    Fault(
        "a rank without holmes",
        (r"1 of 4 ranks did not report within 5 s: rank 3",),
        ranks={"3": {"stock": True}},
        flags=SHORT,
        gone=(3,),
        default=False,
    ),
    Fault(
        "killed before it reports",
        (r"1 of 4 ranks did not report within 5 s: rank 2",),
        ranks={"2": {"do": "kill", "when": "before"}},
        flags=SHORT,
        gone=(2,),
        default=False,
    ),
    Fault(
        "stopped before it reports",
        (r"1 of 4 ranks did not report within 5 s: rank 2",),
        ranks={"2": {"do": "stop", "when": "before"}},
        flags=SHORT,
        gone=(2,),
        default=False,
    ),
    Fault(
        "killed in the preflight",
        (r"node b1 .rank 3. did not finish it within 6 s",),
        ranks={"3": {"do": "kill", "when": "preflight"}},
        env={"PREFLIGHT_S": "6"},
        gone=(3,),
        default=False,
    ),
    Fault(
        "stopped in the preflight",
        (r"node b1 .rank 3. did not finish it within 6 s",),
        ranks={"3": {"do": "stop", "when": "preflight"}},
        env={"PREFLIGHT_S": "6"},
        gone=(3,),
        default=False,
    ),
    Fault(
        "killed between plan and first group",
        (
            r"rank (0, )?3 did not come to init_process_group within 5 "
            r"s",
        ),
        ranks={"3": {"do": "kill", "when": "agreed"}},
        flags=SHORT,
        gone=(0, 3),
        default=False,
    ),
    Fault(
        "stopped between plan and first group",
        (
            r"rank (0, )?3 did not come to init_process_group within "
            r"5 s",
        ),
        ranks={"3": {"do": "stop", "when": "agreed"}},
        flags=SHORT,
        gone=(0, 3),
        default=False,
    ),
    Fault(
        "nobody hosts the store",
        (r"cannot reach the job's store at 10.77.0.1:",),
        ranks={"0": {"do": "exit", "when": "before"}},
        flags=SHORT,
        gone=(0,),
    ),
    Fault(
        "a store that does not answer",
        (
            r"store at 10.77.0.1:.* does not answer|cannot reach the job's store at "
            r"10.77.0.1:|got no verdict",
        ),
        ranks={"0": {"do": "silent", "when": "before"}},
        flags=("--holmes-timeout", "2"),
        gone=(0,),
        default=False,
    ),
    Fault(
        "the store's host dies in the preflight",
        (r"got no verdict from the launcher's rank 0",),
        ranks={"0": {"do": "kill", "when": "preflight"}},
        gone=(0,),
    ),
    Fault(
        "the store's host stops in the preflight",
        (r"got no verdict from the launcher's rank 0|takes connections and does not answer",),
        ranks={"0": {"do": "stop", "when": "preflight"}},
        gone=(0,),
        default=False,
    ),
    Fault(
        "one rank looks for the store elsewhere",
        (
            r"rank 2 on a1 cannot reach the job's store at "
            r"10.77.0.4:",
        ),
        ranks={"2": {"environ": {"MASTER_ADDR": B1}}},
        flags=SHORT,
        default=False,
    ),
)

SLOW = {"PAUSE_S": "0.5"}
PATIENT = ("--holmes-link-timeout", "2")
IN_TRAINING = (
    Fault(
        "cable of the fast NIC pulled",
        (
            r"rank 3 on node b1: NIC roce0 .mlx5_0:1. .*fabric b, 10.101.0.4. has no link for .* "
            r"the job ends "
            r"here",
        ),
        during=(cable("b1", "roce0"),),
        flags=PATIENT,
        env={**SLOW, "GROUP_TIMEOUT_S": "15"},
        gone=(0, 1, 2),
    ),
    Fault(
        "fast NIC set down on its node",
        (
            r"rank 3 on node b1: NIC roce0 .*is set down for .* the job ends "
            r"here",
        ),
        during=(set_down("b1", "roce0"),),
        flags=PATIENT,
        env={**SLOW, "GROUP_TIMEOUT_S": "15"},
        gone=(0, 1, 2),
        default=False,
    ),
    Fault(
        "cable of InfiniBand pulled",
        (r"rank 0 on node a0: NIC ib0 .*has no link for .* the job ends here",),
        during=(cable("a0", "ib0"),),
        flags=PATIENT,
        env={**SLOW, "GROUP_TIMEOUT_S": "15"},
        gone=(1, 2, 3),
        default=False,
    ),
    Fault(
        "cable of Ethernet pulled",
        (
            r"rank 3 on node b1: NIC eth0 .*fabric ethernet, 10.77.0.4. has no link for .* the job ends here",
        ),
        during=(cable("b1", "eth0"),),
        flags=PATIENT,
        env={**SLOW, "GROUP_TIMEOUT_S": "15"},
        gone=(0, 1, 2),
        default=False,
    ),
    Fault(
        "cable pulled and back in time",
        (
            r"NIC roce0 .* has no link; the job ends in 60 s unless",
            r"NIC roce0 .* of node b1 is back after",
        ),
        0,
        during=(cable("b1", "roce0"),),
        undo_during="has no link; the job ends",
        flags=("--holmes-link-timeout", "60"),
        env=SLOW,
    ),
    Fault(
        "packets of the fast NIC vanish",
        (
            r"rank [23] on node b[01]: communication failed.*b[01] does not answer on roce0 .*but does over "
            r"eth0",
        ),
        1,
        during=(silent("b1", "roce0"),),
        env={**SLOW, "GROUP_TIMEOUT_S": "12"},
        default=False,
    ),
    Fault(
        "packets of Ethernet vanish",
        (r"communication failed.*does not answer on eth0 10.77.0",),
        1,
        during=(silent("b1", "eth0"),),
        env={**SLOW, "GROUP_TIMEOUT_S": "12"},
        default=False,
    ),
    Fault(
        "packets of a whole node vanish",
        (r"communication failed.*node b[01] does not answer on .* over no NIC: the node is lost",),
        1,
        during=(silent("b1", "eth0"), silent("b1", "roce0")),
        env={**SLOW, "GROUP_TIMEOUT_S": "12"},
        default=False,
    ),
    Fault(
        "killed in a reduction",
        (r"communication failed; node b1 .rank 3. is lost",),
        1,
        ranks={"3": {"do": "kill", "when": 3}},
        gone=(3,),
        env={"GROUP_TIMEOUT_S": "20"},
    ),
    Fault(
        "killed in a pipeline send",
        (r"communication failed; node a1 .rank 1. is lost",),
        1,
        ranks={"2": {"do": "kill", "when": "send"}},
        gone=(2,),
        env={"GROUP_TIMEOUT_S": "20"},
        default=False,
    ),
    Fault(
        "stopped in a reduction",
        (r"communication failed: .*[Tt]imed out",),
        1,
        ranks={"3": {"do": "stop", "when": 3}},
        gone=(3,),
        env={"GROUP_TIMEOUT_S": "6"},
        default=False,
    ),
    Fault(
        "stopped in a pipeline send",
        (r"communication failed: .*[Tt]imed out",),
        1,
        ranks={"2": {"do": "stop", "when": "send"}},
        gone=(2,),
        env={"GROUP_TIMEOUT_S": "6"},
        default=False,
    ),
    Fault(
        "cable pulled in a pipeline send",
        (
            r"rank 2 on node b0: NIC eth0 .*has no link for .* the job "
            r"ends here",
        ),
        during=(rate("b0", "eth0", 1_000_000, 250_000_000), cable("b0", "eth0")),
        flags=PATIENT,
        env={**SLOW, "GROUP_TIMEOUT_S": "15"},
        gone=(0, 2, 3),
        default=False,
    ),
    Fault(
        "cable pulled in the middle of a reduction",
        (r"rank 3 on node b1: NIC roce0 .*has no link for .* the job ends here",),
        during=(rate("b1", "roce0", 1_000_000, 1_600_000_000), cable("b1", "roce0")),
        flags=PATIENT,
        env={**SLOW, "GROUP_TIMEOUT_S": "15"},
        gone=(0, 1, 2),
        default=False,
    ),
    Fault(
        "fast NIC at 1 % of its rate",
        (r"step 6 sum 6",),
        0,
        during=(rate("b1", "roce0", 16_000_000, 1_600_000_000),),
        env=SLOW,
    ),
    Fault(
        "Ethernet at 1 % of its rate",
        (r"step 6 sum 6",),
        0,
        during=(rate("b1", "eth0", 2_500_000, 250_000_000),),
        env=SLOW,
        default=False,
    ),
)

FAULTS = AT_START + DISAGREE + AWAY + IN_TRAINING
