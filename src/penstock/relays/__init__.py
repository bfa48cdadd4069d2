"""What a trainer reads for the workers of its job: `read_by="trainer"`. See `relays.asking`."""
