"""The one process that decides who runs what: journal, request loop, health."""
