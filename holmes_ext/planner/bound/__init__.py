"""Lower bounds on the step time of shapes, placements, cluster orders and node subsets."""
