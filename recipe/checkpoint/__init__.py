"""Checkpoints that are complete or absent, and that continue in any layout.

A save: `commit.py` has the protocol, `files.py` when files are written, `native.py` what a rank writes. A resume:
`find.py` chooses, `elastic.py` loads into any layout. Offline: `inspect_checkpoint.py`, `reshard.py`. Imports `shared`,
`settings` and `engine`. Open `commit.py` first.
"""
