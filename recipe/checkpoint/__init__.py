"""Checkpoints: committed atomically, verified before they are loaded, readable by AutoModel."""
