"""From processes to ranks: who runs where, how they meet, what they share on a host, and how they are told to stop.

Imports `shared`. Open `start.py` first.
"""
