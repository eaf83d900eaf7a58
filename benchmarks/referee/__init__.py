"""Parts of benchmarks/planners.py: the cases, the common form of plans, the judge, and the planners."""
