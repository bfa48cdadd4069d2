"""What holds for tests with frameworks."""

collect_ignore_glob = ["*_program.py"]  # run by the tests, as processes with arguments of their own
