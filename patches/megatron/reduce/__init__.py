"""Patches of megatron-core's gradient reduction, and of its gathers of updated weights.

They set overlap and bucket sizes as the plan of the job says:

    reduction.py    overlaps the reduction with the backward pass, on every pipeline stage
    buckets.py      finds bucket sizes with which the distributed optimizer's checkpoints are correct
    gather.py       gathers updated weights during the next forward pass (--holmes-overlap on)
    tied.py         sums the gradient of an embedding that two stages share, hierarchically
"""
