"""Low precision as a transform of the Program: FP8, and MXFP8 and NVFP4 in emulation.

`fmeg.value_and_grad(loss_fn, precision=fmeg.precision.fp8(…))`: a model says nothing about it. Products are chosen by
the parameter that they use, tagged, differentiated, and only then rewritten, so each of the three products of a linear
layer has casts of its own.

formats   number formats, scales: `amax`, `quantize`, with their sharding rules
scaled    the product of quantised tensors
recipe    `fp8`, `mxfp8`, `nvfp4`: what is rewritten, and how operands are scaled
layers    stacks of layers taken apart and put together
mark      before differentiation: products are chosen, scans split
rewrite   after it: products are rewritten
"""

from fmeg.precision.formats import Format
from fmeg.precision.mark import mark
from fmeg.precision.recipe import Recipe, fp8, mxfp8, nvfp4
from fmeg.precision.rewrite import lower_precision

__all__ = ["Format", "Recipe", "fp8", "lower_precision", "mark", "mxfp8", "nvfp4"]
