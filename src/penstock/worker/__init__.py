"""Runs one job's streams and serves their output: `runtime` behind a data socket."""
