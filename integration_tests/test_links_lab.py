"""The plain torch example over three clusters with unequal, long links: sums up and down a tree of
clusters.
"""

from integration_tests.jobs import ROOT, full, lab_fixture, same
from integration_tests.test_reduction_lab import GRADIENT_MB, train

three_links = lab_fixture(ROOT / "examples" / "clusters" / "three_links_6.toml")


@full
def test_losses_are_stock_s_and_the_tree_is_followed(three_links, tmp_path):
    stock, _ = train(three_links, tmp_path, 6, env={"GLOO_SOCKET_IFNAME": "eth0"})
    holmes, sent = train(three_links, tmp_path, 6, *three_links.holmes)
    assert len(stock) == 6 and same(stock, holmes, 1e-6)
    # b is the root: it sends the total to both others, each of which sends its sum once; half of it from each
    # node
    for node, megabytes in sent.items():
        wanted = GRADIENT_MB * (1.0 if node.startswith("b") else 0.5)
        assert wanted <= megabytes / 6 <= wanted * 1.1 + 0.15, (node, megabytes / 6, wanted)
