"""The list of decisions: a row for each, with its title and status."""

import re
from pathlib import Path

DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"


def test_the_list_is_complete():
    rows = re.findall(
        r"^\| \[(\d{4})\]\(([^)]+)\) \| (.+) \| (\w+) \|$",
        (DECISIONS / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    found = []
    for path in sorted(DECISIONS.glob("0*.md")):
        title, status = re.match(
            r"# (.+)\n\nStatus: (\w+)", path.read_text(encoding="utf-8")
        ).groups()
        number, name = title.split(": ", 1)
        found.append((number, path.name, name, status))
    assert rows == found
