"""The page of a run: charts, distributions, samples and settings, live or as a file."""
