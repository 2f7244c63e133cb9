"""One file per baseline; `base` is the contract and `loader` finds them."""
