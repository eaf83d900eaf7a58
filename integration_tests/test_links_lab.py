"""Tests the plain torch example over three clusters with long links of different rates.

Gradients are summed up and down a tree of clusters.
"""

from integration_tests.jobs import ROOT, full, lab_fixture, same
from integration_tests.test_reduction_lab import GRADIENT_MB, train

three_links = lab_fixture(ROOT / "examples" / "clusters" / "three_links_6.toml")


@full
def test_losses_are_stock_s_and_the_tree_is_followed(three_links, tmp_path):
    stock, _ = train(three_links, tmp_path, 6, env={"GLOO_SOCKET_IFNAME": "eth0"})
    holmes, sent = train(three_links, tmp_path, 6, *three_links.holmes)
    assert len(stock) == 6 and same(stock, holmes, 1e-6)
    # Cluster b is the root of the tree: it sends the total to both other clusters, and each of these sends
    # its sum once. Both nodes of a cluster send a half.
    for node, sent_mb in sent.items():
        gradients = 1.0 if node.startswith("b") else 0.5
        expected_mb = GRADIENT_MB * gradients
        step_mb = sent_mb / 6
        assert expected_mb <= step_mb <= expected_mb * 1.1 + 0.15, (node, step_mb, expected_mb)
