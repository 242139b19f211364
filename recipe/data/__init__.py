"""From text to batches: files and datasets, tokenising, conversations, packing, the token store, the order, the loader.

Imports `shared` and `settings`. Open `prepare.py` first.
"""
