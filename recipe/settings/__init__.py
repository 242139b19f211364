"""Everything a user says, settled before any work: flags, DeepSpeed's JSON with our block, and the sizes of the model.

Loads without torch. Imports `shared` and the standard-library files of modeling/. Open `resolve.py` first.
"""
