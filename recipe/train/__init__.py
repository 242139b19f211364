"""A training run from its settled request to its results: preparation, resume, the loop, metrics and logs.

Imports every room above it in the list of docs/architecture.md. Open `loop.py` first.
"""
