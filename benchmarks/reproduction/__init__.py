"""The papers' own figures beside ours, on modelled hardware: docs/reproduction.md."""
