"""How gradients are summed: each way prices itself, and says which NICs and links it uses."""
