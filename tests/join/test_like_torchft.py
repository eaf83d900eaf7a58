"""The numbers of torchft's DiLoCo regression fixtures, for two jobs.

The fixtures are those of meta-pytorch/torchft at 7eb7087, test_fixtures/
torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_updates_0 to _5.json.

Two fragments of one weight, 1 at first; every inner step takes 2 off; outer SGD, lr 2, no momentum;
sync_every 6. torchft's fragment_update_alpha is mix=, its fragment_sync_delay delay=.
"""

import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of

from holmes_ext.join.settings import parse_outer

#: (fragment_sync_delay, fragment_update_alpha) -> the weights before each step.
FIXTURES = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (0, 1.0): ([1 - 2 * k for k in range(16)], [1 - 2 * k for k in range(16)]),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
    (1, 1.0): ([1 - 2 * k for k in range(16)], [1 - 2 * k for k in range(16)]),
}


def train(name, port, settings, steps):
    """Both weights before each step."""
    model = torch.nn.ParameterList([torch.ones(1, 1), torch.ones(1, 1)])
    joined = joined_of(model, name, port, settings)
    joined.begin()
    history = [[p.item() for p in model]]
    for _ in range(steps):
        with torch.no_grad():
            for p in model:
                p -= 2
        joined.after_step()
        history.append([p.item() for p in model])
    joined.end()
    return history


@pytest.mark.parametrize("delay, alpha", FIXTURES)
def test_fixtures(delay, alpha):
    settings = parse_outer(
        f"min=2,every=6,fragments=2,delay={delay},mix={alpha},lr=2,momentum=0,compress=off"
    )
    with coordinator() as server:
        jobs = ("east", "west")
        found = in_threads(
            {name: lambda name=name: train(name, server.port, settings, 15) for name in jobs}
        )
    expected = list(map(list, zip(*FIXTURES[delay, alpha])))
    for history in found.values():
        wanted = torch.tensor(expected, dtype=torch.float32)
        torch.testing.assert_close(torch.tensor(history), wanted, rtol=0, atol=1e-6)
