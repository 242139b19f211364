"""The seam to DeepSpeed, and CUDA graphs of decoder blocks.

Only `engine.py` and `checkpoint/native.py` import deepspeed. Imports `shared` and modeling/. Open `engine.py` first.
"""
