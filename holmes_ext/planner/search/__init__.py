"""The search of plans: shapes, arrangements, partitions, bounds, what was found."""
