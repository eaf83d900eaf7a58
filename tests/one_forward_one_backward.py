"""The 1F1B schedule worked out plainly, for tests of the formulas."""


def simulate(forward, backward, transfer, micro_batches):
    """Return the time at which each stage ends a step of the 1F1B schedule.

    Each operation begins after the one before it on its stage, and after the message that it needs from a
    neighbour.

    Args:
        forward: Seconds of a forward pass, by stage.
        backward: Seconds of a backward pass, by stage.
        transfer: Seconds of a message between a stage and the next, by stage.
    """
    stages, done = len(forward), {}
    programs = []
    for stage in range(stages):
        warm = min(stages - stage - 1, micro_batches)
        steady = [op for i in range(micro_batches - warm) for op in (("F", warm + i), ("B", i))]
        programs.append(
            [("F", i) for i in range(warm)]
            + steady
            + [("B", i) for i in range(micro_batches - warm, micro_batches)]
        )
    clock, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(programs[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(programs[s]):
                kind, i = programs[s][at[s]]
                if kind == "F":
                    ready = 0.0 if s == 0 else done.get(("F", s - 1, i))
                    delay = transfer[s - 1] if s else 0.0
                else:
                    ready = done.get(("F", s, i)) if s == stages - 1 else done.get(("B", s + 1, i))
                    delay = transfer[s] if s < stages - 1 else 0.0
                if ready is None:
                    break
                clock[s] = max(clock[s], ready + delay) + (forward if kind == "F" else backward)[s]
                done[kind, s, i] = clock[s]
                at[s] += 1
    return clock
