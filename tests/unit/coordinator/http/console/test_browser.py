"""The console in a headless Chromium: nothing that a stranger wrote runs, and both colour schemes are drawn.

Needs the program `chromium` (Debian's package of this name), in the path or named by CHROMIUM.
"""

import asyncio
from pathlib import Path

import pytest

from smq.testing.served import Served, serving
from tests.skips import needs, program
from tests.unit.coordinator.http.console.test_pages import EVIL, fill

PROGRAM = program("chromium")
pytestmark = needs("chromium")
OWNED = EVIL.replace("alert(1)", "document.title='owned'")
RUN_S = 60


async def browse(served: Served, directory: Path, path: str, *options: str) -> str:
    """What the browser writes to its standard output."""
    assert PROGRAM is not None
    url = f"http://127.0.0.1:{served.server.http_address[1]}/console/{path}"
    profile = f"--user-data-dir={directory / 'profile'}"
    command = (PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", profile, *options, url)
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=null)
    async with asyncio.timeout(RUN_S):
        written, _ = await process.communicate()
    return written.decode()


def test_scripts_in_records_and_names_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.coordinator.http.console.test_pages.EVIL", OWNED)

    async def body(served: Served) -> None:
        await fill(served)
        for path in ("topics/t/messages", "topics/t/messages?contains=%22%3E%3Cscript%3Edocument.title=1", "groups"):
            shown = await browse(served, tmp_path, path, "--dump-dom")
            assert "· smq</title>" in shown, path
            assert "<script" not in shown.lower(), "the browser has made no element of it"
        assert "document.title='owned'" in await browse(served, tmp_path, "topics/t/messages", "--dump-dom")

    serving(tmp_path, body)


def test_the_style_is_loaded_and_follows_the_colour_scheme(tmp_path: Path) -> None:
    async def body(served: Served) -> None:
        await fill(served)
        images = {}
        for scheme, number in (("dark", 0), ("light", 1)):
            file = tmp_path / f"{scheme}.png"
            size = ("--window-size=800,600", f"--screenshot={file}")
            await browse(served, tmp_path, "topics", *size, f"--blink-settings=preferredColorScheme={number}")
            images[scheme] = corner(file)
        assert images["dark"] < 64 < 192 < images["light"]

    serving(tmp_path, body)


def corner(file: Path) -> float:
    """The brightness of the first pixel, 0 to 255: the page's background."""
    from matplotlib.image import imread

    return float(imread(str(file))[0][0][:3].mean() * 255)
