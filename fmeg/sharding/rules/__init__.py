"""Sharding rules of plain torch operations, a family a file, in one table.

pointwise     elementwise, with broadcasting
reduction     sum, mean, max, var, norm, …
view          reshapes and permutations
slicing       slice, select, split, cat, stack, pad, tril, …
matmul        mm, bmm, addmm, …
softmax       softmax, log_softmax
norm          layer norm, RMS norm, group norm
indexing      embedding, gather, scatter, index, topk, sort
loss          nll_loss, mse_loss, …
sdpa          torch's attention kernels
convolution   convolution
creation      zeros, full, arange, …
"""

from fmeg.program.errors import NoRuleError
from fmeg.program.rule import rule
from fmeg.sharding.rules.registry import register, rule_for

__all__ = ["NoRuleError", "register", "rule", "rule_for"]
