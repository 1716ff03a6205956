"""reproduction: compare papers' figures with ours, on modeled hardware (docs/reproduction.md)."""
