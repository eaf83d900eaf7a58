"""How many micro-batches each pipeline stage has under way (Traffic.in_flight), and what they take of its memory."""

from __future__ import annotations

from holmes_ext.cluster.site import Site
from holmes_ext.options import Options
from holmes_ext.plan.cost.nodes import Predictor
from holmes_ext.plan.cost.pipeline import quickest_in_flight, worth_hiding
from holmes_ext.plan.layout import Layout
from holmes_ext.plan.plan import NOMINAL, Plan
from holmes_ext.plan.traffic import SOCKETS


def under_way(plan: Plan, site: Site, options: Options) -> tuple[int, ...]:
    """On each stage, site: of the plan, for one carrier. () under the framework's own schedule, and where no edge is
    worth hiding. As many as 1F1B has where nobody told the model, whose activations fill memory; what the user asked
    for is taken as it is."""
    sizes, work = plan.sizes, plan.workload
    on = options.inflight != "off" and options.counts_on("deepspeed-edges", "megatron-edges")
    if sizes is None or sizes.pipeline == 1 or not on:
        return ()
    if asked := asked_in_flight(options, sizes.pipeline, work.micro_batches):
        return asked
    if plan.basis == NOMINAL:
        return tuple(range(sizes.pipeline, 0, -1))
    predictor = Predictor(site, Layout(sizes, plan.processes), work)
    edges, size = predictor.edges(predictor.parts(plan.nodes)), work.activation_bytes
    forward = tuple(load.forward_s for load in plan.loads) or (work.forward_s,) * sizes.pipeline
    backward = tuple(load.backward_s for load in plan.loads) or (work.backward_s,) * sizes.pipeline
    seconds, sent = tuple(edge.seconds(size) for edge in edges), tuple(edge.byte_s * size for edge in edges)
    if not worth_hiding([f + b for f, b in zip(forward, backward)], seconds):
        return ()
    most = tuple(load.most for load in plan.loads)
    return quickest_in_flight(forward, backward, seconds, work.micro_batches, sent, most)


def asked_in_flight(options: Options, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Where the user gave a number: that many more than 1F1B has; else ()."""
    if options.inflight in ("auto", "off"):
        return ()
    more = int(options.inflight)
    return tuple(min(own + more * (own > 1), micro_batches) for own in range(stages, 0, -1))


def more_bytes(plan: Plan, carrier: str = SOCKETS) -> tuple[float, ...]:
    """That each stage keeps more than under 1F1B; () where nothing is known of the model's activations."""
    held = plan.traffic_of(carrier).in_flight
    own = (min(one, plan.workload.micro_batches) for one in range(len(held), 0, -1))
    return tuple((one - least) * load.kept_bytes for one, least, load in zip(held, own, plan.loads))
