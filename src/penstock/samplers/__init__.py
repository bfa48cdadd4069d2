"""Samplers of the user: what a loader reads, drawn in the trainer and turned into units.

`drawing` is one epoch of a sampler, `feeder` what streams on workers are sent of it, `local_units` what a run in the
trainer's own process takes; `pipelines` says which pipelines can be read so.
"""
