"""What the commands share for showing things."""
