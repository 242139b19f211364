"""One step of a run as one rank of any number, without the others: the bytes it sends counted, its memory followed.

The real model runs on fake tensors, DeepSpeed's real engine on tensors whose memory is never touched. Imports `engine`
for that; `plan` only for the flags, the job they describe, and the prediction that is printed beside the count. Open
`dry_run.py` first.
"""
