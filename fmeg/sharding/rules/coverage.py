"""What the table covers, as the page docs/coverage.md.

Write it again after a change: `python -m fmeg.sharding.rules.coverage > docs/coverage.md`.
"""

from __future__ import annotations

from fmeg.sharding.rules.registry import FAMILIES
from fmeg.sharding.rules.table import RuleFn

_HEAD = """# Coverage: plain torch operations that can be sharded

A function that `fmeg.jit` partitions may call any of these, besides the operations of `fmeg.ops`. Each is checked by
`tests/sharding/test_rules.py`: every placement that its rule allows, on virtual meshes of 2 and 2 x 2, against the
operation on one device (of kernels that only a GPU has, the shapes alone are checked). An operation that is not here
raises `NoRuleError`, which shows how to register a rule.

"Whole" means that a sharded dimension is gathered first (and, under `strict`, refused). A name without overload, such
as `add`, stands for all overloads. `F.scaled_dot_product_attention`, `F.cross_entropy`, `F.layer_norm`, `F.rms_norm`,
`F.embedding`, `F.linear`, `@` and `torch.einsum` become operations of `fmeg.ops` where the two agree.

This page is made by `python -m fmeg.sharding.rules.coverage`.
"""


def coverage() -> str:
    """The page: for each family, its rules and the operations that follow them.

    >>> coverage().splitlines()[0]
    '# Coverage: plain torch operations that can be sharded'
    """
    parts = [_HEAD]
    for family in FAMILIES:
        title = family.__name__.rpartition(".")[2]
        parts.append(f"## {title}\n\n{(family.__doc__ or '').strip()}\n")
        by_rule: dict[RuleFn, list[str]] = {}
        for name, fn in family.RULES.items():
            by_rule.setdefault(fn, []).append(f"`{name.removeprefix('aten.')}`")
        rows = [f"| {', '.join(names)} | {_summary(fn)} |" for fn, names in by_rule.items()]
        parts.append("\n".join(["| operations | rule |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _summary(fn: RuleFn) -> str:
    return (fn.__doc__ or "").strip().splitlines()[0].replace("|", "\\|")


if __name__ == "__main__":
    print(coverage(), end="")
