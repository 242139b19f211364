"""Weights in and out of Hugging Face folders and the hub, and what fine-tuning needs of them.

Imports `shared`, `settings`, `engine` and `checkpoint`. Open `export.py` first, `load.py` for the way in.
"""
