"""Weights of the jobs' pseudo-gradients in the sum of a round. Pure: no clock, no network.

A pseudo-gradient is the difference of a job's weights over its inner steps; the outer optimizer applies
the weighted sum of all jobs' pseudo-gradients (DiLoCo, arXiv 2311.08105).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from holmes_ext.join.coordinator.state import RoundState

#: Number of recent norms of a fragment whose median counts as the usual norm.
_REMEMBERED_NORMS = 16
#: Jobs that are needed to identify the outlier among them.
_LEAST_JOBS_TO_COMPARE = 3


def weights_in_sum(
    round_state: RoundState,
    ranks: Mapping[str, int],
    settings: Mapping[str, Any],
    usual_norms: list[float],
) -> dict[str, float]:
    """Return the unnormalized weight of each job whose pseudo-gradient counts in the round.

    The weight is the job's number of tokens, or 1 with the setting weight=equal. A pseudo-gradient
    counts if it is finite and neither its norm nor its tokens exceed `limit` times the usual value
    (`limit`: a setting; 0: no limit). Jobs whose pseudo-gradients do not count are written to
    `round_state.left_out`, with the reasons.

    Args:
        round_state: The round, with the jobs' reports (norm and tokens of their pseudo-gradients).
        ranks: Job -> number of its ranks, for all jobs that could take part.
        settings: The --holmes-outer settings.
        usual_norms: Norms of the fragment's recent pseudo-gradients; those of this round are appended.

    Returns:
        Job -> weight.
    """
    reports = {name: round_state.ready_reports[name] for name in ranks}
    norms: dict[str, float] = {}
    round_state.left_out = {}
    for name, report in reports.items():
        if report.norm is None:
            round_state.left_out[name] = report.why or "its pseudo-gradient is not finite"
        else:
            norms[name] = report.norm

    limit = float(settings.get("limit", 0))
    _leave_out_long_gradients(round_state, norms, limit, usual_norms)
    usual_norms += norms.values()
    del usual_norms[:-_REMEMBERED_NORMS]
    if settings.get("weight") == "equal":
        return dict.fromkeys(norms, 1.0)
    tokens = {name: reports[name].tokens or 1.0 for name in norms}
    return _plausible_tokens(round_state, tokens, ranks, limit)


def _leave_out_long_gradients(
    round_state: RoundState, norms: dict[str, float], limit: float, usual_norms: list[float]
) -> None:
    """Exclude jobs whose pseudo-gradient has a norm above `limit` times the median.

    The median is taken over the norms of earlier rounds. Without earlier rounds, it is taken over this
    round's norms, if they are at least three. Nothing is excluded if there is no median, or if all
    norms are too large.

    Args:
        round_state: The round; its `left_out` gets excluded job -> reason.
        norms: Job -> norm of its pseudo-gradient in this round; excluded jobs are deleted.
        limit: Largest plausible ratio to the median; 0: no limit.
        usual_norms: Norms of the fragment's recent pseudo-gradients.
    """
    typical_norms = list(usual_norms)
    if not typical_norms and len(norms) >= _LEAST_JOBS_TO_COMPARE:
        typical_norms = list(norms.values())
    if not typical_norms:
        return
    median_norm = statistics.median(typical_norms)
    if not limit or not median_norm:
        return
    too_long = [name for name, norm in norms.items() if norm > limit * median_norm]
    if len(too_long) == len(norms):
        return  # all jobs at once: the training itself has changed
    for name in too_long:
        times_usual = norms.pop(name) / median_norm
        round_state.left_out[name] = (
            f"its pseudo-gradient is {times_usual:.3g} times as long as usual (limit={limit:g})"
        )


def _plausible_tokens(
    round_state: RoundState, tokens: dict[str, float], ranks: Mapping[str, int], limit: float
) -> dict[str, float]:
    """Return the tokens by which each job's pseudo-gradient is weighted, without outliers.

    Jobs that train the same model process about the same number of tokens per rank.

    1. A job that reports more than `limit` times the median per rank is excluded from the round.
    2. The tokens of each other job are capped at `limit` times the tokens of the median job.

    With fewer than three jobs, nothing changes.

    Args:
        round_state: The round; its `left_out` gets excluded job -> reason.
        tokens: Job -> tokens that it reports; excluded jobs are deleted.
        ranks: Job -> number of its ranks.
        limit: Largest plausible ratio to the median; 0: no limit.
    """
    if not limit or len(tokens) < _LEAST_JOBS_TO_COMPARE:
        return tokens
    tokens_per_rank = {name: count / ranks[name] for name, count in tokens.items()}
    median_per_rank = statistics.median_low(tokens_per_rank.values())
    for name, count in tokens_per_rank.items():
        if count > limit * median_per_rank:
            del tokens[name]
            times_median = count / median_per_rank
            round_state.left_out[name] = (
                f"it claims {times_median:.3g} times the others' tokens for each rank "
                f"(limit={limit:g})"
            )
    most_tokens = limit * statistics.median_low(tokens.values())
    return {name: min(count, most_tokens) for name, count in tokens.items()}
