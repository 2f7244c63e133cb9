"""Exchange kernels and their oracle. Nothing here imports the harness."""
