"""A cluster in one process, seeded: the real decisions and the real stream protocol, under faults."""
