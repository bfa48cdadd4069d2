"""Tests with the real frameworks, in an environment of their own: `make test-trainers`."""
