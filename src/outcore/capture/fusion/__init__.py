"""fusion: replace groups of ops by single ops with kernels of torch's compiler."""
