"""From a statement that somebody made to a verdict: which sweeps it needs, which runs hold them, what they say."""
