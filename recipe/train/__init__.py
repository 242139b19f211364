"""A training run from its settled request to its results: preparation, the loop, metrics and records.

Imports every room above it in the list of docs/architecture.md. Open `loop.py` first.
"""
