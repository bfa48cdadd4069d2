"""Checks for operators, sources and pipelines, shipped so that users can hold their own to them."""
