"""The numbered rules of the contract: each is cited by a check of the kit or a test, and no other number is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CITATION = re.compile(r"\(([RPBCMWO]\d(?:, [RPBCMWO]\d)*)\)")
TESTS = ("core/mrv2/testing/suites", "tests", "adapters", "examples", "packages")


def cited():
    """Rule to the files that cite it."""
    found = {}
    for folder in TESTS:
        for file in (ROOT / folder).rglob("*.py"):
            if folder in ("core/mrv2/testing/suites", "tests") or "tests" in file.parts:
                for group in CITATION.findall(file.read_text()):
                    for rule in group.split(", "):
                        found.setdefault(rule, set()).add(file)
    return found


def test_every_rule_is_held_by_something_that_says_so():
    page = (ROOT / "docs" / "adapter-contract.md").read_text()
    rules = re.findall(r"^- \*\*(\w\d)\*\* ", page, re.M)
    assert len(rules) == len(set(rules)) > 25
    assert set(rules) == set(cited())


def test_rules_are_counted_without_gaps():
    page = (ROOT / "docs" / "adapter-contract.md").read_text()
    numbers = {}
    for letter, number in re.findall(r"^- \*\*(\w)(\d)\*\* ", page, re.M):
        numbers.setdefault(letter, []).append(int(number))
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())
