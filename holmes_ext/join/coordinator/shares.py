"""Which pseudo-gradients of a round count, and how much. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from holmes_ext.join.coordinator.state import RoundState

#: Norms of so many rounds of a fragment say what is usual.
_USUAL_ROUNDS = 16


def counted(
    round_state: RoundState,
    ranks: Mapping[str, int],
    settings: Mapping[str, Any],
    usual: list[float],
) -> dict[str, float]:
    """Return the weight in the sum (tokens, or 1) of each job whose pseudo-gradient counts.

    A pseudo-gradient counts if it is finite, and neither its norm nor its tokens are out of all
    proportion (the setting `limit`). The jobs that do not count are written to
    round_state.left_out, with the reason.

    Args:
        ranks: Number of ranks of each job that could take part.
        usual: Norms in the fragment's last rounds, to which those of this round are added.
    """
    reports = {name: round_state.ready_reports[name] for name in ranks}
    norms = {name: report.norm for name, report in reports.items() if report.norm is not None}
    round_state.left_out = {
        name: report.why or "its pseudo-gradient is not finite"
        for name, report in reports.items()
        if report.norm is None
    }
    limit = float(settings.get("limit", 0))
    typical = [*usual] or [norm for norm in norms.values() if len(norms) > 2]
    middle = statistics.median(typical) if typical else 0.0
    far = [name for name, norm in norms.items() if limit and middle and norm > limit * middle]
    if len(far) < len(norms):  # if all of them are, it is the training and not a job
        for name in far:
            times = norms.pop(name) / middle
            round_state.left_out[name] = (
                f"its pseudo-gradient is {times:.3g} times as long as usual (limit={limit:g})"
            )
    usual += norms.values()
    del usual[:-_USUAL_ROUNDS]
    if settings.get("weight") == "equal":
        return dict.fromkeys(norms, 1.0)
    tokens = {name: reports[name].tokens or 1.0 for name in norms}
    return _plausible_tokens(round_state, tokens, ranks, limit)


def _plausible_tokens(
    round_state: RoundState, tokens: dict[str, float], ranks: Mapping[str, int], limit: float
) -> dict[str, float]:
    """Return the tokens of each job that counts.

    Jobs of one model have about the same tokens per rank: a job that claims `limit` times the
    median is left out, and none counts as more than `limit` times the median job.
    """
    if not limit or len(tokens) < 3:
        return tokens
    each = {name: count / ranks[name] for name, count in tokens.items()}
    middle = statistics.median_low(each.values())
    for name, count in each.items():
        if count > limit * middle:
            del tokens[name]
            times = f"{count / middle:.3g} times the others' tokens for each rank (limit={limit:g})"
            round_state.left_out[name] = f"it claims {times}"
    most = limit * statistics.median_low(tokens.values())
    return {name: min(count, most) for name, count in tokens.items()}
