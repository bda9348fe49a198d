"""Proof that layouts do not change what is computed: properties, a matrix of layouts, and mutations that must be found.

assert_equivalent(fn, *args, mesh=…, layout=…)   a function on a mesh equals itself on one device
meshes() layouts() specs()                       hypothesis strategies, valid by construction (they need hypothesis)
check_rule(op, *args)                            a sharding rule against the operation, by enumeration
cases(sizes)                                     the layout matrix

The modules `verify` (the matrix against one device) and `mutate` (every collective broken in turn) are also commands:
`fmeg verify`, `fmeg mutate`.
"""

from typing import Any

from fmeg.testing.equivalent import assert_equivalent, errors, relative_error
from fmeg.testing.matrix import Case, cases
from fmeg.testing.rulecheck import check_rule

__all__ = [
    "Case",
    "assert_equivalent",
    "cases",
    "check_rule",
    "errors",
    "layouts",
    "meshes",
    "relative_error",
    "specs",
]


def __getattr__(name: str) -> Any:
    if name in ("layouts", "meshes", "specs"):  # hypothesis is no dependency of fmeg's own
        from fmeg.testing import strategies

        return getattr(strategies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
