"""Traces of a run taken apart: where each rank's time goes, as a page and as JSON.

Imports `shared`; the traces may come from any program. Open `summary.py` first.
"""
