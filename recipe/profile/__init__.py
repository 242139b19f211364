"""Where the time of a step goes: traces of all ranks, taken apart and drawn."""
