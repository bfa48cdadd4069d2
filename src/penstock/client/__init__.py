"""The library inside the trainer: loader, fetch, state."""
