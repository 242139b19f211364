"""What every room may need: ranks that agree or fail alike, exit codes, units, JSON files, FLOPs, bytes sent, commands.

Imports nothing of recipe/ but itself. Open `ranks.py` first: how ranks exchange host values; then `together.py`.
"""
