"""What a trainer reads for the workers of its job (`read_by="trainer"`).

The engine on a worker sees a source like any other; each reading of it is a relay, asked for message by message
(`relays.asking`, which is data alone), and answered out of the trainer's own sources. Neither end knows of streams,
rounds or states: any trainer of the job gives the same rows for the same ask, whenever it comes.
"""
