"""Small kernels with which the harness times a GPU and measures its floor. No exchange uses them."""
