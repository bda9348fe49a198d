"""From a local Program to the one that runs: rewrites that keep its meaning and save time or memory.

inline          one microbatch is no loop
behind          gradients of layers are reduced layer by layer
hoist           casts of scanned parameters leave the scan
late            what is made of inputs alone is made where it is first used
common          equal operations between two loops are one
wide            products that are cast to a wider type are summed into it
added           products begin from what they are added to
split           products in float32 by tensor cores, where one operand was, or the result becomes, bf16
experts         a layer of experts: pairs of products, the activation and its gradient in one pass each
quantised       FP8 operands: once, in both orders, as they are made; parameters before the scan
norms           a norm's gradient and the residual stream's in one pass
chunked_loss    a linear layer and its cross entropy in chunks of rows, logits never in full, nor a shard of them
lookups         tokens travel to a table sharded along its width, not the table to them
hasten          reductions are begun before a loop that can hide them, gathers right behind one
pipeline        all of them, in order
vendor          another library's kernels, where asked for
beside          gathers and reductions in parts, beside the products they feed or that feed them, where asked for
"""

from fmeg.lower.beside import beside, hidden
from fmeg.lower.pipeline import lower
from fmeg.lower.vendor import check_lowering, vendor_kernels

__all__ = ["beside", "check_lowering", "hidden", "lower", "vendor_kernels"]
