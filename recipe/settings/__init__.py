"""Everything a user says, settled before any work: flags, DeepSpeed's JSON with our `parallel` block, the model's sizes.

Loads without torch. Imports `shared` and the standard-library files of modeling/. Open `resolve.py` first.
"""
