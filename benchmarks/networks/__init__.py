"""networks: compute memory and FLOP of a training step of each network, without running it."""
