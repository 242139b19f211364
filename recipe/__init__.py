"""The training recipe: what the user said, the DeepSpeed engine, data, checkpoints and the loop."""
