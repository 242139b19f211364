"""Which layout to rent GPUs for: memory, bytes and seconds of every layout that the trainer would accept.

Loads without torch. Imports `shared`, `settings` and the standard-library files of modeling/. Open `search.py` first:
it tries what `space.py` lists, each a `Job` of `job.py`, on a machine of `hardware.py`. `memory.py` says what a job
keeps, `traffic.py` what it sends, `step_time.py` how long it takes; `report.py`, `explain.py` and `write.py` tell
people, programs and the trainer.
"""
