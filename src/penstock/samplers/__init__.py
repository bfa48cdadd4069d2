"""Samplers of the user: what a loader reads, drawn in the trainer and turned into units."""
