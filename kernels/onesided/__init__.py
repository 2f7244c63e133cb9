"""One-sided dispatch and combine over NVLink, in CUDA: `OneSidedAllToAll` in `exchange` is the way in."""
