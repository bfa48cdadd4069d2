"""What the processes of a job know together of what is kept.

Entries lie where `caching` keeps them, on one host each: here the other hosts are asked for theirs, and answered, and
the dispatcher is asked what is worth keeping. Nothing here decides what is in an entry, nor what becomes of one.
"""
