"""The best plans, each run for a few steps and held against what was predicted."""
