"""The command line: one command per file; click and rich are imported here and nowhere else."""
