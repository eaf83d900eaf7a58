"""What no schedule of passes beats on a pipeline, whatever its order: with the backward whole or in two.

f, i, w: forward, gradients of input and weights on a stage; x: a stage link; m: micro-batches; K: those whose
activations the stage's memory holds, from the forward to the weights' gradient. On stage s

    down       sum above (f + x)                       its first forward begins after that
    R          f + sum below (f + i + 2 x)             from a forward's begin to that
                                                       micro-batch's gradient, at least
    idle       max(0, R - min(K, m) f)                 before its first gradient it
                                                       can do no more than K forwards
    last I     m (f + i) + max(0, m - K) w             before the last forward all but
                                                       K weights' gradients are done
    rounds     (R + i + w) for each K micro-batches    the K-th forward after one waits for that one's memory
    up         sum above (i + x), then one w of the first stage

A step takes the longest of: down + idle + all work; down + idle + last I + up; down + rounds + R + i + up.
"""

from __future__ import annotations

from holmes_ext.plan.schedule import Times


def least_s(times: Times) -> float:
    """Seconds from the first forward to the end of the last pass of all stages."""
    f, i, w, x, m = times.forward, times.inputs, times.weights, times.transfer, times.micro_batches
    result, down, up = 0.0, 0.0, 0.0
    for stage, most in enumerate(times.most):
        in_flight = min(most, m)
        below = range(stage + 1, len(f))
        trip = f[stage] + sum(f[at] + i[at] + 2 * x[at - 1] for at in below)
        work = m * (f[stage] + i[stage] + w[stage])
        idle = max(0.0, trip - in_flight * f[stage])
        tail = up + w[0]
        result = max(result, down + idle + work)
        result = max(
            result, down + idle + m * (f[stage] + i[stage]) + (m - in_flight) * w[stage] + tail
        )
        trips = (m - 1) // in_flight
        result = max(result, down + trips * (trip + i[stage] + w[stage]) + trip + i[stage] + tail)
        if stage < len(x):
            down, up = down + f[stage] + x[stage], up + i[stage] + x[stage]
    return result
