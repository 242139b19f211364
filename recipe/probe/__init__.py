"""What this machine and its links can do, measured and written to a file that the planner reads."""
