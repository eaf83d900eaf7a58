"""What benchmarks/planners.py is made of: cases, plans that all planners share, the judge, and a module a
planner."""
