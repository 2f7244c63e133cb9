"""What is exchanged: who is routed where, and the rows. The same on every rank, process and machine."""
