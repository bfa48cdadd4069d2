"""Runs streams and serves their output: nursery, agent, runner."""
