"""The one-sided exchange between GPUs of one NVLink domain: Fence and Sentinel in CUDA."""
