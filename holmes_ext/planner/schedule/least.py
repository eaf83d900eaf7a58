"""Lower bound on the time of a pipeline over all orders of its passes, with split backward passes.

A backward pass is split into the gradient of the input and the gradient of the weights. The previous
stage waits for the former; the latter may come later. A stage keeps a micro-batch's activations from
the forward pass to the gradient of the weights, so its memory limits the micro-batches under way.
"""

from __future__ import annotations

from holmes_ext.plan.schedule import Times


def least_s(times: Times) -> float:
    """Return a lower bound on the seconds of a pipeline's passes, over all orders of the passes.

    It counts from the first forward pass to the end of the last pass. Each stage gives three
    bounds, and the largest of all counts. Each is a sum that begins with the first activation's way
    through the stages before:

        by_work      all passes of the stage, and its idle time until the first gradient arrives
        by_memory    the passes and idle time until the stage's last gradient of the input; then
                     that gradient goes on to the first stage, with its work there
        by_rounds    with memory for K micro-batches, micro-batch n + K begins after the end of n

    Args:
        times: Seconds of the passes and stage links, and most micro-batches that each stage can
            hold.
    """
    micro_batches = times.micro_batches
    stage_count = len(times.forward)
    result = 0.0
    down_s = 0.0  # forward passes and links of the stages before
    up_s = 0.0  # gradients of the input, and links, of the stages before
    for stage, most in enumerate(times.most):
        forward_s = times.forward[stage]
        input_s = times.inputs[stage]
        weights_s = times.weights[stage]
        in_flight = min(most, micro_batches)
        # From the start of a forward pass until the micro-batch's gradient comes back: the stages
        # behind do its forward pass and its gradient of the input, and both use the links.
        trip_s = forward_s + sum(
            times.forward[later] + times.inputs[later] + 2 * times.transfer[later - 1]
            for later in range(stage + 1, stage_count)
        )
        # Before its first gradient the stage can do only the forward passes that its memory has
        # room for.
        idle_s = max(0.0, trip_s - in_flight * forward_s)
        # The last gradient goes to the first stage. This then does its gradient of the weights.
        tail_s = up_s + times.weights[0]

        all_passes_s = micro_batches * (forward_s + input_s + weights_s)
        by_work_s = down_s + idle_s + all_passes_s

        # When the last gradient of the input is done, at most `in_flight` gradients of the weights
        # are not: the memory holds the activations of no more micro-batches.
        inputs_s = micro_batches * (forward_s + input_s)
        weights_before_s = (micro_batches - in_flight) * weights_s
        by_memory_s = down_s + idle_s + inputs_s + weights_before_s + tail_s

        # Each round takes a trip and both gradients. After the rounds, the last micro-batch makes
        # its trip.
        rounds = (micro_batches - 1) // in_flight
        round_s = trip_s + input_s + weights_s
        by_rounds_s = down_s + rounds * round_s + trip_s + input_s + tail_s

        result = max(result, by_work_s, by_memory_s, by_rounds_s)
        if stage < len(times.transfer):
            down_s = down_s + forward_s + times.transfer[stage]
            up_s = up_s + input_s + times.transfer[stage]
    return result
