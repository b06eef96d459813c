"""docs/reference/evidence.md: each rule of replication with the tests that hold it, and planted bugs that break it.

Tests name their rules (`test_rule_07_...`), planted bugs begin with them (`7: ...`, `4 and 13: ...`). Fails if a rule
has no test.
"""

import ast
import re
from collections import defaultdict
from typing import Final

from chaos_tests.sim.partition.planted import COURSE_BUGS
from chaos_tests.sim.planted.catalogue import BUGS
from docs.generate import DOCS, ROOT, table

_HEAD: Final = """\
# What holds each rule

Generated from the names of tests and from the planted bugs by `make docs`; do not edit. [rules.md](../rules.md) has the
rules of replication, [planted-bugs.md](planted-bugs.md) the bugs: each breaks one rule in the production code, and the
simulation finds it. A rule without a planted bug is held by its tests alone.

"""
_NUMBERED: Final = re.compile(r"^(\d+)\. +\*\*(.+?)(?: \[[MA]\])?(?:\.\*\*|\*\*)", re.MULTILINE)
_OF_TEST: Final = re.compile(r"test_rule_(\d\d)_")
_OF_BUG: Final = re.compile(r"[\d, and]+(?=:)")


def render() -> str:
    tests, bugs = _tests(), _bugs()
    rows = []
    for number, title in rules().items():
        if number not in tests:
            raise ValueError(f"rule {number} has no test: name one test_rule_{number:02d}_...")
        files = ", ".join(f"`{file}` ({count})" for file, count in sorted(tests[number].items()))
        rows.append((str(number), title, files, ", ".join(f"`{name}`" for name in bugs[number])))
    return _HEAD + table(("rule", "", "tests", "planted bugs"), rows)


def rules() -> dict[int, str]:
    """Number and title of each rule of replication."""
    text = (DOCS / "rules.md").read_text()
    part = text[text.index("## Replication\n") : text.index("## The consensus library\n")]
    return {int(number): title.rstrip(".") for number, title in _NUMBERED.findall(part)}


def _tests() -> dict[int, dict[str, int]]:
    """By rule: how many tests each file has for it."""
    found: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (number := _OF_TEST.match(node.name)):
                found[int(number[1])][path.relative_to(ROOT / "tests").as_posix()] += 1
    return found


def _bugs() -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    named = [(bug.rule, bug.name) for bug in BUGS] + [(bug.rule, bug.name) for bug in COURSE_BUGS]
    for rule, name in named:
        if numbers := _OF_BUG.match(rule):
            for number in re.findall(r"\d+", numbers[0]):
                found[int(number)].append(name)
    return found
