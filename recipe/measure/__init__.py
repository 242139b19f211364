"""This machine measured for the planner (`gather-moe probe`), and its best plans tried (`gather-moe sweep`).

Imports `plan` and below. Open `probe.py` and `sweep.py` first.
"""
