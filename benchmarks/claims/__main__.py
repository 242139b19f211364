"""Recompute the claims: `PYTHONPATH=. python benchmarks/claims` from the project's root."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from claims.command import main

    sys.exit(main())
