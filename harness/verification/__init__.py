"""Whether a backend's outputs are right, bit for bit, and the contract every backend passes."""
