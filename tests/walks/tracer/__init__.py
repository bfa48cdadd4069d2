"""A folder for PYTHONPATH: every Python process that has it there is traced."""
