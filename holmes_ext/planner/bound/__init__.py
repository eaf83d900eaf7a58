"""What no plan beats: of shapes, of arrangements, of splits; by closed form and simulated."""
