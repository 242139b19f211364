"""One step of the real model on fake tensors, as one rank of a group of any size: collectives and storages counted.

Imports `engine` and `plan`, the latter only to print both side by side. Open `dry_run.py` first.
"""
