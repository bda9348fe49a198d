"""Vendor and Triton lowerings. Nothing else in the tree knows about devices.

attention       cuDNN's and torch's flash kernels, and which kernel is for what
masked          attention under any mask
rows            losses with their gradient, norms' gradients, rotations; products into memory that is given
grouped         products of rows sorted by expert
experts         what is around them: sorting, packing, weighing and gating rows, top-k
split           float32 as parts in bf16
fp8             FP8 operands in both orders at once
te              TransformerEngine's kernels

Files that begin with `_triton` hold the Triton programs, and are imported where one first runs.
"""
