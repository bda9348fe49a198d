"""The pages say what is true: their Python runs, in order, one namespace a page; their links lead somewhere.

A block opened by ```python runs; with `>>>` it is a doctest. One opened by ```python fragment is for reading only.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^( *)```python *\n(.*?)^\1``` *$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(text: str) -> list[tuple[int, str]]:
    """(line before the first one, source) of each block that runs."""
    found = []
    for m in BLOCK.finditer(text):
        lines = [line.removeprefix(m[1]) for line in m[2].splitlines(keepends=True)]
        found.append((text.count("\n", 0, m.start(2)), "".join(lines)))
    return found


def run(text: str, page: str) -> dict[str, object]:
    """Run a page's blocks; errors and failures name the page's own lines."""
    scope: dict[str, object] = {"__name__": "__page__"}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for line, source in blocks(text):
        if source.lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(source, scope, page, page, line)
            test.globs = scope
            report: list[str] = []
            assert not runner.run(test, out=report.append, clear_globs=False).failed, "".join(report)
        else:
            exec(compile("\n" * line + source, page, "exec"), scope)
    return scope


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES if blocks(p.read_text())])
def test_python_on_the_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page.read_text(), str(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_within_the_tree_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    local = [t.split("#")[0] for t in LINK.findall(text) if not re.match(r"[a-z]+:|#", t)]
    assert not [t for t in local if not (page.parent / t).exists()]


PAGE = """
```python
x = 2
```
```python fragment
this is … not Python
```
1. indented

   ```python
   >>> x + 1
   {three}
   ```
"""


def test_what_runs_and_what_does_not():
    assert run(PAGE.format(three=3), "page")["x"] == 2
    with pytest.raises(AssertionError, match='File "page", line 11'):
        run(PAGE.format(three=4), "page")
    with pytest.raises(ZeroDivisionError) as error:
        run("text\n\n```python\ny = 1\n1 / 0\n```\n", "page")
    assert error.traceback[-1].lineno + 1 == 5
