"""Runs a graph in one process."""
