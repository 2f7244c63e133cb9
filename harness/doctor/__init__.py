"""Is this machine fit for a sweep? What every rank sees, what follows from it, and what to do."""
