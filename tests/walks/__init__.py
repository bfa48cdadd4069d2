"""Which modules an event enters, over all processes: `python -m tests.walks`."""
