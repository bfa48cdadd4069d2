"""Measurements in, a reasoned decision out. Pure: no clock, no thread, no I/O."""
