"""Processes: supervisors, workers, the group they form, and how a fault costs one unit and no more."""
