"""Which layout to rent GPUs for: memory, bytes and seconds of every layout that the trainer would accept.

Loads without torch. Imports `shared`, `settings` and the standard-library files of modeling/. Open `search.py` first.
"""
