"""What every other room may need: ranks that agree or fail alike, errors with exit codes, units, FLOPs, subcommands.

Imports nothing of recipe/ but itself. Open `ranks.py` first: how ranks exchange host values; then `agreement.py`.
"""
