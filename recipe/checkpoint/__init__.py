"""Checkpoints that are complete or not there, and that continue in any layout.

`commit.py` has the protocol of a save, `native.py` what ranks write, `elastic.py` how another layout goes on from it.
Imports `shared`, `settings` and `engine`. Open `commit.py` first.
"""
