"""The fleet simulator: policies over thousands of workers, in minutes."""
