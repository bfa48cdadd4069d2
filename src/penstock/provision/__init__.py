"""Who brings workers when they are wanted, and lets them go when they are not."""
