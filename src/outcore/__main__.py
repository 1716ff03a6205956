"""`python -m outcore`: the command line."""

from __future__ import annotations

from outcore.cli import main

if __name__ == "__main__":
    main()
