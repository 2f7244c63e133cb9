"""Run directories, rows, samples and where they come from. The only code that writes results."""
