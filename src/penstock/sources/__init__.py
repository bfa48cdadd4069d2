"""Formats: list the splits of a source, and read a split from any position."""
