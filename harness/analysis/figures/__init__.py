"""One file for each figure of a report, each with `draw`; what they share is in canvas.py."""
