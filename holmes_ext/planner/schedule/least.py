"""Lower bound on the time of a pipeline over all orders of its passes, with split backward passes.

Letters of the formulas, in seconds:

    f, i, w    forward pass, gradient of the input, gradient of the weights, of a micro-batch on a stage
    x          stage link: from sending an activation to its arrival
    m          number of micro-batches
    K          micro-batches whose activations fit the stage's memory, from the forward pass to the
               gradient of the weights

On stage s

    down       sum of (f + x) over the stages before: the first forward pass cannot begin earlier
    trip       f + sum of (f + i + 2 x) over the stages behind: from the start of a forward pass to the
               arrival of that micro-batch's gradient
    idle       max(0, trip - min(K, m) f): before its first gradient a stage can do K forward passes only
    last i     m (f + i) + max(0, m - K) w: when the last gradient of the input is done, all but K
               gradients of the weights are
    rounds     trip + i + w for each K micro-batches: the forward pass K later waits for the memory
    up         sum of (i + x) over the stages before, then one w of the first stage

The time is at least each of

    down + idle + m (f + i + w)
    down + idle + last i + up
    down + rounds + trip + i + up
"""

from __future__ import annotations

from holmes_ext.plan.schedule import Times


def least_s(times: Times) -> float:
    """Return a lower bound on the seconds from the first forward pass to the end of the last pass.

    The letters and terms are those of the module docstring: f, i, w are the passes of each stage, x its link
    to the next stage, m the micro-batches.

    Args:
        times: Seconds of the passes, and most micro-batches of each stage.
    """
    f, i, w, x = times.forward, times.inputs, times.weights, times.transfer
    m = times.micro_batches
    result = 0.0
    down = 0.0
    up = 0.0
    for stage, most in enumerate(times.most):
        in_flight = min(most, m)  # K
        behind = range(stage + 1, len(f))
        trip = f[stage] + sum(f[later] + i[later] + 2 * x[later - 1] for later in behind)
        idle = max(0.0, trip - in_flight * f[stage])
        all_work = m * (f[stage] + i[stage] + w[stage])
        tail = (
            up + w[0]
        )  # way of the last gradient to the first stage, and its gradient of the weights

        by_work = down + idle + all_work
        by_memory = down + idle + m * (f[stage] + i[stage]) + (m - in_flight) * w[stage] + tail
        rounds = (m - 1) // in_flight
        by_rounds = down + rounds * (trip + i[stage] + w[stage]) + trip + i[stage] + tail
        result = max(result, by_work, by_memory, by_rounds)
        if stage < len(x):
            down = down + f[stage] + x[stage]
            up = up + i[stage] + x[stage]
    return result
