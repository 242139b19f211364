"""The real model on tensors without numbers, in a group of any size: what would be sent and kept, counted."""
