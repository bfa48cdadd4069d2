"""The cluster as data: events, state, decisions. Pure."""
