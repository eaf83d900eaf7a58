"""Files of a small job's telemetry, as runtime/measure/telemetry_file.py writes them. For tests."""

import json

FABRICS = {"ib": ["ib", 2_000_000_000], "ethernet": ["ethernet", 250_000_000]}
#: Nodes' clocks are so far apart; each file says so.
OFFSETS = {"a0": 0.0, "b0": 500.0}


def step(rank, number, offset, exposed, traced=False):
    """Return a step of one second.

    It has an all-reduce in the data group (rank 1 comes 0.1 s late), and a message from rank 0 to
    1.
    """
    begin = number * 1.0 - offset
    late = 0.1 * (rank == 1)
    line = {"step": number, "begin": begin, "end": begin + 1.0, "tokens": 640}
    line["groups"] = [
        ["data", "ethernet", "across", 1, 2_000_000, 2_000_000, 0.5 - late, exposed],
        ["pipeline", "ethernet", "across", 1, 1000, 1000 * (rank == 0), 0.1, 0.1],
    ]
    line["between"] = (
        [["a", "b", 2_001_000, exposed]] if rank == 0 else [["b", "a", 2_000_000, exposed]]
    )
    if traced:
        line["spans"] = [["forward", begin, begin + 0.2], ["backward", begin + 0.2, begin + 0.4]]
        line["ops"] = [
            [
                "data",
                "ethernet",
                "all_reduce",
                "1",
                number,
                None,
                begin + 0.4 + late,
                begin + 0.9,
                exposed,
                2_000_000,
            ],
            [
                "pipeline",
                "ethernet",
                "send" if rank == 0 else "receive",
                "0",
                number,
                1 - rank,
                begin + 0.2 - late,
                begin + 0.3,
                0.1,
                1000 * (rank == 0),
            ],
        ]
    return line


def write(directory, run="run1", ranks=(0, 1), steps=8, world=2, exposed=(0.4, 0.2), **head):
    """Write the files of `ranks` in directory/run, and return that folder.

    Steps 2 and 5 are traced.
    """
    place = directory / run
    place.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        node = "a0" if rank == 0 else "b0"
        about = {
            "run": run,
            "rank": rank,
            "world": world,
            "node": node,
            "cluster": node[0],
            "fabrics": FABRICS,
        }
        lines = [{"holmes_telemetry": 1, **about, **head}, {"clock": [OFFSETS[node], 0.0001]}]
        lines += [
            step(rank, number, OFFSETS[node], exposed[rank % 2], number in (2, 5))
            for number in range(steps)
        ]
        (place / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place
