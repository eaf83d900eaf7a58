"""First contact of a job with `holmes join serve`: its certificate, and the settings of the run.

Rank 0 gets both and broadcasts them to the other ranks over the job's own process group, like other settings
of the job. So only rank 0 needs the invitation and a place to keep the certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from holmes_ext.document import Table
from holmes_ext.join.address import JoinAddress, JoinPlace, port_range
from holmes_ext.join.coordinator.client import repeat_until_reached
from holmes_ext.join.early_contact import EarlyContact, RunSettings, settings_of_run
from holmes_ext.join.identity.job_certificate import JobCertificate, obtain_certificate
from holmes_ext.join.settings import OuterSettings, merge_settings, parse_outer
from holmes_ext.join.shards.job_ranks import JobRanks
from holmes_ext.join.sockets.handshake import Credentials
from holmes_ext.options import Options
from holmes_ext.runtime.deadline import Deadline

#: Seconds to wait for the coordinator beyond two timeouts of the job.
_EXTRA_S = 10.0


class Admission(NamedTuple):
    """Result of admit(): how a job reaches its coordinator, and the settings with which it trains."""

    place: JoinPlace
    settings: OuterSettings


def admit(
    address: JoinAddress,
    options: Options,
    environ: Mapping[str, str],
    job_ranks: JobRanks,
    early: EarlyContact | None = None,
) -> Admission:
    """Return the credentials of this job and the settings of its run; collective.

    Args:
        address: Name of the job, and address of the coordinator.
        options: Options of the job.
        environ: Environment variables.
        job_ranks: Collectives over the ranks of the job.
        early: May have read the settings already.

    Raises:
        HolmesError: The coordinator was not reached or refuses the job, or --holmes-outer
            contradicts the settings of the run.
    """
    outer_text = options.value("outer")
    certificate_file = options.value("join_certificate")
    ports = port_range(options.value("join_ports"), options.value("join_address"), environ)
    timeout_s = parse_outer(outer_text).timeout
    # The coordinator may be started after this job: rank 0 calls it again and again until this deadline.
    deadline = Deadline(2 * timeout_s + _EXTRA_S, "the coordinator")

    def on_rank_0() -> dict[str, Any]:
        """Return the job's certificate and the settings of its run, as a document for all ranks.

        With --holmes-join-certificate, the certificate in it is None: each rank reads that file itself.
        """
        certificate: JobCertificate | None = None
        if certificate_file:
            credentials = _site_credentials(options)
        else:
            invitation = options.value("join_invitation")
            certificate = repeat_until_reached(
                lambda: obtain_certificate(address, invitation, environ, deadline),
                address,
                deadline,
            )
            credentials = certificate.credentials()
        place = JoinPlace(address, credentials, ports)

        def read_settings() -> RunSettings:
            return repeat_until_reached(lambda: settings_of_run(place, deadline), address, deadline)

        settings = early.settings(read_settings) if early is not None else read_settings()
        fields = None if certificate is None else asdict(certificate)
        return {"certificate": fields, "settings": settings}

    answer = job_ranks.run_on_all_ranks(lambda: on_rank_0() if job_ranks.rank == 0 else None)
    answer = job_ranks.broadcast_from_rank_0(answer)

    def on_this_rank() -> Admission:
        if certificate_file:
            credentials = _site_credentials(options)
        else:
            credentials = JobCertificate(**answer["certificate"]).credentials()
        settings = _settings_of_job(answer["settings"], outer_text)
        return Admission(JoinPlace(address, credentials, ports), settings)

    admission: Admission = job_ranks.run_on_all_ranks(on_this_rank)
    return admission


def _site_credentials(options: Options) -> Credentials:
    return Credentials.of_site(options.value("join_certificate"), options.value("join_ca"))


def _settings_of_job(run_settings: dict[str, Any] | None, outer_text: str) -> OuterSettings:
    """Return the settings of this job: those of the run, with the job's own `timeout` and `part`.

    Args:
        run_settings: Settings that the coordinator requires of all jobs. None: it requires none, so this
            job joins with the settings of its --holmes-outer.
        outer_text: Value of the job's --holmes-outer.

    Raises:
        HolmesError: Both contradict each other, or the settings cannot be read.
    """
    if run_settings is None:
        return parse_outer(outer_text)
    source = "settings of `holmes join serve` (install the same holmes_ext)"
    return merge_settings(Table(run_settings, source).into(OuterSettings), outer_text)
