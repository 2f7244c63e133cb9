"""Published values and claims: what others say, what was measured here, and how far the two agree."""
