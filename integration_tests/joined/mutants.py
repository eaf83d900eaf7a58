"""Mutation test of the code of joined jobs: breaks it in many ways, one at a time, and runs tests.

    python integration_tests/joined/mutants.py [--only WORD] [--json FILE]

Each mutant replaces one text in a file of a copy of the repository, and names the tests that should then
fail. The exit status is 1 if more than two mutants survive. It does not run in CI.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("holmes_ext")
MOST_SURVIVORS = 2  # that are accepted
PATIENCE_S = 400  # for the tests of one mutant
HANDSHAKE = "tests/join/sockets/test_handshake.py"
CHANNEL = "tests/join/sockets/test_channel.py"
LISTENER = "tests/runtime/sockets/test_listener.py"
SERVER = "tests/join/coordinator/test_server.py"
RULES = "tests/join/coordinator/test_rules.py tests/join/coordinator/test_trust.py"
LIARS = "tests/join/test_liars.py"
LINKS = "tests/join/test_links.py"
MEMORY = "tests/join/coordinator/test_memory_of_serve.py tests/join/sockets/test_memory.py"
TAKE = "tests/join/test_take.py"
FOLDER = "tests/join/identity/test_run_folder.py"
CERTIFICATES = "tests/join/identity/test_job_certificate.py"
ROUTES = "tests/join/test_routes.py"
INPUTS = "tests/join/test_bad_inputs.py"
MEMBERS = "tests/join/test_members_attacks.py"
PAIRS = "tests/join/coordinator/test_failed_pairs.py"
CUT = "tests/join/test_cut_pair.py"
NEVER = "if False:"


@dataclass(frozen=True)
class Mutant:
    """One way to break the code."""

    name: str  # what is broken
    file: str  # path below holmes_ext/
    old: str  # text of the file, which must occur once
    new: str  # text that replaces it
    tests: str  # files of tests that should fail, or "FILE -k EXPRESSION"


MUTANTS = [
    Mutant(
        "a job is told the same donor again and again",
        "join/coordinator/versions.py",
        "member.failed_donors.add(member.ordered_donor)",
        "pass",
        RULES + " -k donor",
    ),
    Mutant(
        "no round waits for a job that takes weights",
        "join/coordinator/rolling.py",
        "if self._waits_for_taker(now):",
        NEVER,
        "tests/join/coordinator/test_rolling_rounds.py",
    ),
    Mutant(
        "no round waits for members of the last one",
        "join/coordinator/rolling.py",
        "if self._waits_for_last_members(now):",
        NEVER,
        "tests/join/coordinator/test_rolling_rounds.py",
    ),
    Mutant(
        "weights are taken over direct connections only",
        "join/peers/take.py",
        'self._donor.routes.dial(peer, {"purpose": "fetch"}, deadline, or_relay=True)',
        'self._donor.routes.dial(peer, {"purpose": "fetch"}, deadline)',
        CUT + " -k only_donor",
    ),
    Mutant(
        "the relay calls no rank",
        "join/coordinator/relay.py",
        "if called_end is not None:",
        NEVER,
        CUT + " -k only_donor",
    ),
    Mutant(
        "the relay calls loopback ports of its host",
        "join/coordinator/relay.py",
        "if not is_loopback(host):",
        "if True:",
        CUT + " -k loopback_port",
    ),
    Mutant(
        "fragments are requested one after another",
        "join/peers/take.py",
        "_READERS = 2",
        "_READERS = 1",
        TAKE + " -k requested",
    ),
    Mutant(
        "an offer counts in several rounds",
        "join/coordinator/rolling.py",
        "self._reports[name] = replace(report, offers={})",
        "pass",
        "tests/join/coordinator/test_rolling_rounds.py",
    ),
    Mutant(
        "one member that reports first drops all others",
        "join/coordinator/settlement.py",
        "2 * len(silent) >= len(members)",
        "False",
        PAIRS,
    ),
    Mutant(
        "a listener of another name is called",
        "join/sockets/handshake.py",
        "if not has_name(holder, name):",
        NEVER,
        HANDSHAKE,
    ),
    Mutant(
        "a caller speaks for any job",
        "join/sockets/handshake.py",
        "if job and job in holder.names:",
        "if True:",
        HANDSHAKE,
    ),
    Mutant(
        "revoked listeners are called",
        "join/sockets/handshake.py",
        "if credentials.is_revoked(holder):\n        raise",
        "if False:\n        raise",
        HANDSHAKE,
    ),
    Mutant(
        "revoked callers are let in",
        "join/sockets/handshake.py",
        "if holder.fingerprint and credentials.is_revoked(holder):",
        NEVER,
        HANDSHAKE,
    ),
    Mutant(
        "connections of revoked certificates go on",
        "join/sockets/handshake.py",
        "            if self.is_revoked(holder):",
        "            if False:",
        HANDSHAKE,
    ),
    Mutant(
        "an end in the first handshake is a refusal",
        "join/sockets/handshake.py",
        'raise ConnectionError(f"{where} broke TLS off',
        'raise NotAuthentic(f"{where} broke TLS off',
        HANDSHAKE,
    ),
    Mutant(
        "no certificate will do",
        "join/sockets/certificates.py",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "context.verify_mode = ssl.CERT_OPTIONAL",
        HANDSHAKE,
    ),
    Mutant(
        "TLS 1.2 will do",
        "join/sockets/certificates.py",
        "SSLContext(protocol)\n    context.minimum_version = ssl.TLSVersion.TLSv1_3",
        "SSLContext(protocol)\n    context.minimum_version = ssl.TLSVersion.TLSv1_2",
        HANDSHAKE,
    ),
    Mutant(
        "the secret goes to anybody",
        "join/identity/invitation.py",
        "if holder_of(connection).fingerprint != invitation.fingerprint:",
        NEVER,
        CERTIFICATES,
    ),
    Mutant(
        "an invitation is for any key",
        "join/identity/run_folder.py",
        "if not has_key_of(record.certificate, request):",
        NEVER,
        FOLDER,
    ),
    Mutant(
        "any job redeems an invitation",
        "join/identity/run_folder.py",
        "if record is None or record.job != job:",
        "if record is None:",
        FOLDER,
    ),
    Mutant(
        "a revoked invitation is redeemed",
        "join/identity/run_folder.py",
        "            if record.revoked:\n",
        "            if False:\n",
        FOLDER,
    ),
    Mutant(
        "two coordinators share a folder",
        "join/identity/run_folder.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        FOLDER,
    ),
    Mutant(
        "files of other users are taken",
        "join/identity/private_files.py",
        "if state.st_uid not in owners:",
        NEVER,
        FOLDER,
    ),
    Mutant(
        "links are followed",
        "join/identity/private_files.py",
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        FOLDER,
    ),
    Mutant(
        "all may read keys",
        "join/identity/private_files.py",
        "os.O_EXCL | os.O_NOFOLLOW, 0o600",
        "os.O_EXCL | os.O_NOFOLLOW, 0o644",
        FOLDER,
    ),
    Mutant(
        "one certificate is several jobs",
        "join/coordinator/gate.py",
        "if other != identity.job and has_same_certificate:",
        NEVER,
        CERTIFICATES,
    ),
    Mutant(
        "a revoked job says hello on its open connection",
        "join/coordinator/gate.py",
        "if self.credentials.is_revoked(holder):",
        NEVER,
        CERTIFICATES,
    ),
    Mutant(
        "the second revocation in a tick is missed",
        "join/coordinator/gate.py",
        "if time.time_ns() < max(version, default=0) + _SETTLED_NS:",
        NEVER,
        CERTIFICATES,
    ),
    Mutant(
        "each job has settings of its own",
        "join/coordinator/gate.py",
        'if text := difference(given, required, "`holmes join serve`"):',
        'if text := "":',
        CERTIFICATES,
    ),
    Mutant(
        "each job has its own min",
        "join/coordinator/gate.py",
        "return replace(hello, min=self._settings.min)",
        "return hello",
        CERTIFICATES,
    ),
    Mutant(
        "an impostor stalls training",
        "join/coordinator/client.py",
        "deadline = deadline.part(_IMPOSTOR_S, deadline.operation)",
        "pass",
        SERVER,
    ),
    Mutant(
        "unread bytes hide the end of a connection",
        "join/sockets/channel.py",
        "return not poll.poll(0)",
        "return True",
        "tests/join/test_attacks.py -k flipped",
    ),
    Mutant(
        "what a terminal obeys is shown",
        "join/sockets/handshake.py",
        'c if c.isprintable() else "?"',
        "c",
        HANDSHAKE,
    ),
    Mutant(
        "the order of frames is not looked at",
        "join/sockets/channel.py",
        "if sequence != self._sequence:",
        NEVER,
        CHANNEL,
    ),
    Mutant(
        "frames may be of any length",
        "join/sockets/channel.py",
        "if length > longest:",
        NEVER,
        CHANNEL,
    ),
    Mutant("NaN is JSON", "join/sockets/documents.py", ", parse_constant=_refuse", "", CHANNEL),
    Mutant(
        "one address may have any number",
        "runtime/sockets.py",
        "if counts[network] >= self._most_per_address:",
        NEVER,
        LISTENER,
    ),
    Mutant(
        "strangers may be any number",
        "runtime/sockets.py",
        "elif len(self._strangers) >= self._most_strangers:",
        "elif False:",
        LISTENER,
    ),
    Mutant(
        "any number is admitted",
        "runtime/sockets.py",
        "if guest not in self._strangers or is_full:",
        NEVER,
        LISTENER,
    ),
    Mutant(
        "accept's first error ends the loop",
        "runtime/sockets.py",
        "if self._closed or self._socket.fileno() < 0:",
        "if True:",
        LISTENER,
    ),
    Mutant(
        "a part may last longer than the whole",
        "runtime/deadline.py",
        "Deadline(min(seconds, self.left), operation)",
        "Deadline(seconds, operation)",
        LISTENER,
    ),
    Mutant(
        "any number of callers is told of",
        "join/coordinator/gate.py",
        "or len(self._latest) >= _COMPLAINTS_IN_ALL:",
        "or False:",
        MEMBERS + " -k crowd",
    ),
    Mutant(
        "each address of an IPv6 network is another caller",
        "runtime/sockets.py",
        "if isinstance(address, ipaddress.IPv6Address):",
        NEVER,
        LISTENER,
    ),
    Mutant(
        "jobs that one invents are awaited as long as it says",
        "join/coordinator/awaited.py",
        "return statistics.median_low(member.hello.timeout for member in self._state.present())",
        "return max(member.hello.timeout for member in self._state.present())",
        MEMBERS + " -k invents",
    ),
    Mutant(
        "any number of jobs is awaited",
        "join/coordinator/awaited.py",
        " and len(self._since) < MOST_JOBS**2:",
        ":",
        MEMBERS + " -k invented",
    ),
    Mutant(
        "who lets the others wait never sits out",
        "join/coordinator/lateness.py",
        "        member.sits_out_until = number + 1 + rest_rounds",
        "        pass",
        MEMBERS + " -k sits",
    ),
    Mutant(
        "who sits out does so alone, too",
        "join/coordinator/lateness.py",
        "< member.sits_out_until and bool(others)",
        "< member.sits_out_until",
        MEMBERS + " -k sits",
    ),
    Mutant(
        "who leaves a round that has begun is not counted",
        "join/coordinator/settlement.py",
        "            mark_unfinished(self._state, self._state.members[name], round_state.number)",
        "            pass",
        PAIRS + " -k vanishes",
    ),
    Mutant(
        "jobs that all sit out wait for ever",
        "join/coordinator/lateness.py",
        " and number >= other.sits_out_until",
        "",
        PAIRS + " -k sit_out",
    ),
    Mutant(
        "no failed pair uses the relay",
        "join/coordinator/settlement.py",
        "elif failures and not round_state.has_tried_relay:",
        "elif False:",
        PAIRS + " -k relay",
    ),
    Mutant(
        "a rank calls directly whatever the coordinator orders",
        "join/peers/routes.py",
        "if not peer.address or self.uses_relay(peer.job):",
        "if not peer.address:",
        CUT,
    ),
    Mutant(
        "whoever is accused is dropped before the only accuser",
        "join/coordinator/state.py",
        "(member.name not in accusers, member.dropped_in,",
        "(member.name in accusers, member.dropped_in,",
        PAIRS + " -k falsely",
    ),
    Mutant(
        "the same job of a pair is dropped each time",
        "join/coordinator/rounds.py",
        "                member.dropped_in = number",
        "                pass",
        PAIRS + " -k turns",
    ),
    Mutant(
        "a pair that has failed is tried again in each round",
        "join/coordinator/state.py",
        "return fewest_to_drop(pairs, drop_preference(pairs, members))",
        "return set()",
        PAIRS + " -k apart",
    ),
    Mutant(
        "late names count in the quorum",
        "join/coordinator/state.py",
        "half = -(-len(electorate) // 2)",
        "half = len(electorate)",
        PAIRS,
    ),
    Mutant(
        "of two jobs the larger timeout counts",
        "join/coordinator/state.py",
        "return statistics.median_low(member.hello.timeout for member in members)",
        "return statistics.median_high(member.hello.timeout for member in members)",
        PAIRS + " -k timeout",
    ),
    Mutant(
        "a job that is cut off waits in each round",
        "join/rounds/coordinator_link.py",
        "if self._is_away and self.client.is_away:",
        NEVER,
        "tests/join/test_coordinator_link.py",
    ),
    Mutant(
        "a peer may take four times as long as the last time",
        "join/peers/transfer.py",
        "min(best, seconds / count)",
        "seconds / count",
        MEMBERS + " -k longer",
    ),
    Mutant(
        "a document may have any number of values",
        "join/sockets/documents.py",
        "if _most_values(data) > MOST_VALUES:",
        NEVER,
        MEMBERS + " -k document",
    ),
    Mutant(
        "a message may be unfinished for an hour",
        "join/sockets/channel.py",
        "return deadline if deadline.left <= seconds else Deadline(seconds, operation)",
        "return deadline",
        CHANNEL + " -k must_end",
    ),
    Mutant(
        "unfinished messages of one job hold any memory",
        "join/sockets/memory.py",
        "if wanted > self._most_of_job:",
        NEVER,
        MEMORY,
    ),
    Mutant(
        "unfinished messages of all jobs hold any memory",
        "join/sockets/memory.py",
        "while self._held.total() + count > self._most:",
        "while False:",
        MEMORY,
    ),
    Mutant(
        "descriptions of jobs hold any memory",
        "join/coordinator/state.py",
        "if kept_bytes > _MOST_HELLO_BYTES:",
        NEVER,
        MEMORY,
    ),
    Mutant(
        "loopback addresses go to other hosts",
        "join/sockets/requests.py",
        "is_elsewhere = not shares_host(channel.socket)",
        "is_elsewhere = False",
        ROUTES + " -k loopback",
    ),
    Mutant(
        "connections of jobs that ended stay open",
        "join/peers/links.py",
        "        self._close_ended()\n",
        "",
        LINKS + " -k behind",
    ),
    Mutant(
        "one job takes all turns",
        "join/peers/take.py",
        "or self._served_takers[job] >= _MOST_TAKERS_OF_ONE_JOB",
        "or False",
        TAKE + " -k turns",
    ),
    Mutant(
        "addresses pile up",
        "join/peers/routes.py",
        "if len(self._unreachable_addresses) >= _MOST_UNREACHABLE:",
        NEVER,
        MEMBERS + " -k pile",
    ),
    Mutant(
        "false reports do not drop a job",
        "join/coordinator/server.py",
        'if question.get("op") not in ("hello", "enter"):',
        NEVER,
        LIARS + " -k malformed_report_drops",
    ),
    Mutant(
        "versions may be any number",
        "join/coordinator/reports.py",
        "if not all(0 <= version <= MOST for version in versions):",
        NEVER,
        RULES,
    ),
    Mutant(
        "maps may have holes",
        "join/coordinator/reports.py",
        "if not (start == expected_start < stop <= MOST and 0 <= rank < ranks):",
        NEVER,
        RULES,
    ),
    Mutant(
        "versions that no round made are believed",
        "join/coordinator/versions.py",
        "if can_have_no_later_version and claim.version > last_step:",
        NEVER,
        RULES,
    ),
    Mutant(
        "a round that one job tells is believed",
        "join/coordinator/membership.py",
        "min(max(state.number, *rounds), most_plausible)",
        "max(state.number, *rounds)",
        RULES,
    ),
    Mutant(
        "a new job keeps the run that was there before it",
        "join/coordinator/membership.py",
        "if is_unknown and is_ahead and self._replaces_current_run(name, now):",
        NEVER,
        RULES,
    ),
    Mutant(
        "a job that returns voids open rounds",
        "join/coordinator/membership.py",
        "if is_unknown and not state.committed:",
        "if not state.committed:",
        RULES + " -k returns_with",
    ),
    Mutant(
        "whoever says so takes the run over",
        "join/coordinator/membership.py",
        "        if not others or state.has_joint_commit:\n            return False\n"
        "        return now - state.started < patience_s(others)",
        "        return True",
        RULES,
    ),
    Mutant(
        "a job of another run is refused for ever",
        "join/coordinator/versions.py",
        "can_have_no_later_version = member.is_up_to_date or member.was_told_to_take_weights",
        "can_have_no_later_version = True",
        RULES,
    ),
    Mutant(
        "after a restart nobody is awaited before weights are taken",
        "join/coordinator/coordinator.py",
        "if self._awaited_peers.majority_is_unknown(now):",
        NEVER,
        RULES,
    ),
    Mutant(
        "what jobs agreed on is not compared",
        "join/coordinator/membership.py",
        "if text := difference(hello.agreed, other.hello.agreed, other.name):",
        "if (text := '') :",
        RULES,
    ),
    Mutant(
        "sizes are not compared",
        "join/coordinator/membership.py",
        "if hello.totals != other.hello.totals or len(hello.claims) != len(other.claims):",
        NEVER,
        RULES,
    ),
    Mutant(
        "a name is taken twice",
        "join/coordinator/membership.py",
        "if member.last_heartbeat > member.rivals[incarnation]:",
        NEVER,
        RULES,
    ),
    Mutant(
        "after a restart the greatest version is so",
        "join/coordinator/consensus.py",
        "statistics.median_high(most_frequent)",
        "max(claim.version for claim in possible)",
        RULES,
    ),
    Mutant(
        "the first checksum is so",
        "join/coordinator/consensus.py",
        "[(checksum, _)] = Counter(checksums).most_common(1)",
        "checksum = checksums[0]",
        RULES,
    ),
    Mutant(
        "one accuser is enough",
        "join/coordinator/consensus.py",
        "if len(reasons) > max(_TOO_FEW_ACCUSERS, half_of_the_others):",
        "if reasons:",
        RULES + " " + LIARS + " -k accus",
    ),
    Mutant(
        "the greatest factor is taken",
        "join/coordinator/consensus.py",
        "statistics.median_low(numbers)",
        "max(numbers)",
        RULES + " " + LIARS + " -k factors",
    ),
    Mutant(
        "what came is not compared",
        "join/coordinator/settlement.py",
        "if excluded := voted_out(accusations_from_digests(digests)):",
        "if excluded := {}:",
        RULES + " " + LIARS + " -k different",
    ),
    Mutant(
        "nobody is left out for what he sent",
        "join/coordinator/settlement.py",
        "round_state.excluded = voted_out(faults)",
        "round_state.excluded = {}",
        RULES + " " + LIARS + " -k NaN",
    ),
    Mutant(
        "the salt of a sum is not looked at",
        "join/coordinator/lock_step.py",
        'report.salted if report.salt_round == round_state.number else ""',
        "report.salted",
        RULES,
    ),
    Mutant(
        "a pseudo-gradient may be of any length",
        "join/coordinator/shares.py",
        "if norm > limit * median_norm",
        "if False",
        RULES,
    ),
    Mutant(
        "tokens may be any number",
        "join/coordinator/shares.py",
        "if count > limit * median_per_rank:",
        NEVER,
        LIARS + " -k tokens",
    ),
    Mutant(
        "what is not finite is used",
        "join/rounds/screening.py",
        "if not math.isfinite(square):",
        NEVER,
        LIARS + " -k NaN",
    ),
    Mutant(
        "what is longer than claimed is used",
        "join/rounds/screening.py",
        "if length > _LONGER * claimed_length + _LENGTH_TOLERANCE:",
        NEVER,
        LIARS + " -k mean_leaves",
    ),
    Mutant(
        "what was sent before is used",
        "join/rounds/screening.py",
        "if 2 * len(repeated) >= len(names):",
        "if True:",
        LIARS + " -k mean_leaves",
    ),
    Mutant(
        "what points another way is used",
        "join/rounds/screening.py",
        "if usual < _LEAST_AGREEMENT:",
        "if True:",
        LIARS + " -k mean_leaves",
    ),
    Mutant(
        "calls for an earlier incarnation are taken",
        "join/peers/routes.py",
        'if not is_admitted or purpose.get("to") != self.identity.incarnation:',
        "if not is_admitted:",
        LINKS,
    ),
    Mutant(
        "another round's bytes are taken",
        "join/peers/transfer.py",
        "if bytes(label) != self._expected_label:",
        NEVER,
        LINKS,
    ),
    Mutant(
        "silence is for ever",
        "join/peers/transfer.py",
        "if time.monotonic() - transfer.last_moved > patience_s:",
        NEVER,
        LINKS,
    ),
    Mutant(
        "a byte now and then is enough",
        "join/peers/transfer.py",
        "if transfer.deadline.passed:",
        NEVER,
        LINKS + " -k byte",
    ),
    Mutant(
        "a connection that is closed meanwhile ends training",
        "join/peers/transfer.py",
        "except (OSError, ValueError):",
        "except ZeroDivisionError:",
        LINKS + " -k between_two",
    ),
    Mutant(
        "weights that are not finite are taken",
        "join/peers/take.py",
        "if not all(bool(part.isfinite().all()) for part in parts.values()):",
        NEVER,
        TAKE,
    ),
    Mutant(
        "older weights than asked for are taken",
        "join/peers/take.py",
        "if any(version < least_version for version in versions):",
        NEVER,
        TAKE,
    ),
    Mutant(
        "a damaged outer state is loaded",
        "join/shards/saved.py",
        '_digest_of(state) == saved.get("digest")',
        "True",
        INPUTS + " -k state",
    ),
    Mutant(
        "a later refusal ends the job",
        "join/coordinator/client.py",
        "if not self._accepted:",
        "if True:",
        SERVER,
    ),
    Mutant(
        "any number of bytes is relayed",
        "join/coordinator/relay.py",
        "return left > 0",
        "return True",
        ROUTES,
    ),
]


def copied(place: Path) -> None:
    """Copy all files that git tracks, as they are now, into a folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        target = place / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def survives(mutant: Mutant, place: Path) -> bool:
    """Return whether the tests of a mutant pass although the code is broken."""
    file = place / PACKAGE / mutant.file
    before = file.read_text()
    assert before.count(mutant.old) == 1, (
        f"{mutant.name}: {before.count(mutant.old)} times in {mutant.file}"
    )
    file.write_text(before.replace(mutant.old, mutant.new))
    try:
        return passes(mutant.tests, place)
    except subprocess.TimeoutExpired:
        return False
    finally:
        file.write_text(before)


def passes(tests: str, place: Path) -> bool:
    """Return whether the tests pass.

    Args:
        tests: Files of tests, or "FILE -k EXPRESSION".
        place: The copy of the repository.
    """
    files, _, chosen = tests.partition(" -k ")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "120",
        *files.split(),
    ]
    command += ["-k", chosen] if chosen else []
    done = subprocess.run(
        command,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place)},
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), (
        f"{tests}: pytest ended with {done.returncode}: {done.stdout[-500:]}"
    )
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", metavar="WORD", default="", help="mutants whose name has it")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write what became of each; those that it has are not tried again",
    )
    args = parser.parse_args()
    outcomes: dict[str, str] = {}  # name of a mutant -> "survives" or "caught"
    if args.json and args.json.exists():
        outcomes = json.loads(args.json.read_text())
    mutants = [
        mutant for mutant in MUTANTS if args.only in mutant.name and mutant.name not in outcomes
    ]
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        copied(place)
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            assert passes(tests, place), f"{tests}: fails with nothing broken"
        print("all tests pass with nothing broken", flush=True)
        for mutant in mutants:
            begin = time.monotonic()
            outcome = "survives" if survives(mutant, place) else "caught"
            outcomes[mutant.name] = outcome
            seconds = time.monotonic() - begin
            print(f"{seconds:5.0f} s  {outcome:8}  {mutant.name}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    survivors = [name for name, outcome in outcomes.items() if outcome == "survives"]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants caught")
    return int(len(survivors) > MOST_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
