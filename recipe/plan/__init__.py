"""Which layout to rent GPUs for: memory, bytes and seconds of every layout that the trainer would accept.

Loads without torch. Imports `shared`, `settings` and the standard-library files of modeling/. Open `search.py` first:
it tries layouts, each as a `Job` of `job.py`, on a machine of `hardware.py`. `memory.py` says what a job keeps,
`traffic.py` what it sends, `step_time.py` how long it takes (computing in `compute_time.py`, transfers in
`transfer_time.py`); `report.py` tells people, programs and the trainer.
"""
