"""One rank of a job of any size, by the real trainer, without the others and without memory.

Tensors have shapes and no values, other ranks are made up, and a step runs to its end: every
message and every allocation, in order. What comes of it is held against the plan.
"""
