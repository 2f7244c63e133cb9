"""epcross: measure the expert-parallel all-to-all of Mixture-of-Experts inference.

`epcross.kernels` holds the exchange kernels and their oracle and knows nothing of the harness;
`epcross.harness` plans, runs, verifies, times and stores. Importing either needs no GPU, MPI, network or
environment variable.
"""

__version__ = "0.1.0"
