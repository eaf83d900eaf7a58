"""Which expert of a mixture of experts lives on which rank, so that few tokens cross slow links."""
