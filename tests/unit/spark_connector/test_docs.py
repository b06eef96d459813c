"""docs/spark.md names every existing option, and no other."""

import re
from pathlib import Path

from smq.spark_connector.options import KNOWN

PAGE = Path(__file__).parents[3] / "docs" / "spark.md"


def test_every_option_is_on_the_page_and_no_other_is_in_its_table() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"`([A-Za-z.]+)`", text))
    assert set(KNOWN) <= named, f"not on the page: {sorted(set(KNOWN) - named)}"
    rows = [line for line in text.partition("## Options")[2].partition("\n## ")[0].splitlines() if line[:3] == "| `"]
    in_table = {name for row in rows for name in re.findall(r"`([A-Za-z.]+)`", row.split("|")[1])}
    assert {"subscribe", "tls.ca"} <= in_table <= {*KNOWN, "metadata"}
