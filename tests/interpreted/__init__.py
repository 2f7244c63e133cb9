"""Tests of Triton programs under Triton's interpreter: for a process that was started with TRITON_INTERPRET=1."""
