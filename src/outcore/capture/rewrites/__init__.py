"""rewrites: change a joint graph, for less memory or for plain PyTorch's results."""
