"""HTML pages with pictures of plans and of runs."""
