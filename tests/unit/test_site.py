"""The documentation as a site: it builds without a warning, so every link leads somewhere, and it loads nothing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/**/*.md", "deploy/**/*.md", "examples/*.md")
CONFIG = ROOT / "docs/site"
LOADED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["'](?:https?:)?//[^"']*""")


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Sphinx as `make site` runs it."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", str(CONFIG), str(source), str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


def test_the_site_is_built_of_all_pages_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    pages = {str(page.relative_to(tmp_path / "site")): page.read_text() for page in tmp_path.rglob("*.html")}
    sources = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    expected = {str(page.relative_to(ROOT).with_suffix(".html")) for page in sources}
    assert {"README.html", "docs/kafka.html", "deploy/README.html", "deploy/monitoring/runbook.html"} <= expected
    assert expected - set(pages) == set()
    [leads_to] = re.findall(r'http-equiv="refresh" content="0; url=([^"]+)"', pages["index.html"])
    assert leads_to in pages
    assert {name: found for name, text in pages.items() if (found := LOADED.findall(text))} == {}
    api = pages["docs/site/python.html"]
    for name in ("Producer.send", "SyncConsumer.assign", "Admin.create_topic", "OffsetAssigner", "UnknownTopic"):
        assert f'id="smq.clients.{name}"' in api, name


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(CONFIG, source / "docs/site", ignore=shutil.ignore_patterns("*.md"))
    index = source / "docs/README.md"
    for link, is_whole in (("#there", True), ("#nowhere", False), (f"{tmp_path.name}.md", False)):
        index.write_text(f"# Title\n\n## There\n\n[a link]({link})\n")
        built = build(source, tmp_path / "site")
        assert (built.returncode == 0) == is_whole, (link, built.stderr)
