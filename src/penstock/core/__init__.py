"""The words every other package speaks. Imports nothing else of Penstock."""
