"""Everything a user says, settled before any work: flags, DeepSpeed JSON with our `parallel` block, model sizes.

Loads without torch. Imports `shared` and the standard-library files of modeling/. Open `resolve.py` first.
"""
