"""sizes: graphs with symbolic sizes, and those with numbers that are made from them."""
