"""What the processes of a job know together of what is kept: what other hosts have, and what is worth keeping."""
