"""From stored rows to what a person reads. No torch, no GPU library."""
