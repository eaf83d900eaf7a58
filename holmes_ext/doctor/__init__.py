"""What `holmes doctor` finds: NICs, nodes side by side, variables, frameworks, a training command."""
