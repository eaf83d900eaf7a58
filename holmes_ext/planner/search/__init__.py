"""Search for the plan with the shortest step: space, bounds, simulation, explanation."""
