"""Experts: the two grouped GEMMs of a mixture-of-experts layer on rows where an exchange left them."""
