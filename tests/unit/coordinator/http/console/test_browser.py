"""The console in a headless Chromium: what a stranger wrote does not run, forms and followed topics work, both schemes.

Needs the program `chromium` (Debian's package of this name), in the path or named by CHROMIUM.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from smq.coordinator.config.node_toml import HttpConfig
from smq.testing.served import Served, served_node
from tests.skips import needs, program
from tests.unit.coordinator.http.console.test_pages import EVIL, fill, numbered

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


async def test_scripts_in_records_and_names_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.coordinator.http.console.test_pages.EVIL", OWNED)

    async with served_node(tmp_path) as served:
        await fill(served)
        for path in ("topics/t/messages", "topics/t/messages?contains=%22%3E%3Cscript%3Edocument.title=1", "groups"):
            shown = await browse(served, tmp_path, path, "--dump-dom")
            assert "· smq</title>" in shown, path
            assert "<script" not in shown.lower(), "the browser has made no element of it"
        assert "document.title='owned'" in await browse(served, tmp_path, "topics/t/messages", "--dump-dom")


async def test_the_style_is_loaded_and_follows_the_colour_scheme(served: Served, tmp_path: Path) -> None:
    await fill(served)
    images = {}
    for scheme, number in (("dark", 0), ("light", 1)):
        file = tmp_path / f"{scheme}.png"
        size = ("--window-size=800,600", f"--screenshot={file}")
        await browse(served, tmp_path, "topics", *size, f"--blink-settings=preferredColorScheme={number}")
        images[scheme] = corner(file)
    assert images["dark"] < 64 < 192 < images["light"]


def corner(file: Path) -> float:
    """The brightness of the first pixel, 0 to 255: the page's background."""
    from matplotlib.image import imread

    return float(imread(str(file))[0][0][:3].mean() * 255)


class Tab:
    """A page that a person uses: it goes to addresses, and sends forms. By Chromium's own protocol for developers."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._number:
                return message["result"]

    async def run(self, expression: str) -> Any:
        return (await self._call("Runtime.evaluate", expression=expression))["result"].get("value")

    async def go(self, url: str) -> None:
        await self._call("Page.navigate", url=url)
        await self.shows("main, form")

    async def shows(self, selector: str, text: str = "") -> None:
        """Returns once there is such an element with that text."""
        elements = f"[...document.querySelectorAll({selector!r})]"
        while not await self.run(  # noqa: ASYNC110 # the browser draws
            f"document.readyState == 'complete' && {elements}.some(e => e.innerText.includes({text!r}))"
        ):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Tab]:
    assert PROGRAM is not None
    profile = directory / "profile"
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}")
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(PROGRAM, *options, "about:blank", stdout=null, stderr=null)
    try:
        async with asyncio.timeout(RUN_S), aiohttp.ClientSession() as session:
            port_file = profile / "DevToolsActivePort"
            while not (port_file.exists() and "\n" in port_file.read_text()):  # noqa: ASYNC110 # written by another process
                await asyncio.sleep(0.05)
            port = port_file.read_text().split()[0]
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                (target,) = [t for t in await response.json() if t["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.wait()


async def test_a_person_changes_something_by_forms_and_the_page_of_a_stranger_cannot(tmp_path: Path) -> None:
    """The browser itself says where a form comes from."""

    async with served_node(tmp_path, http=HttpConfig(console_changes=True)) as served:
        await fill(served)
        port = served.server.http_address[1]
        async with opened(tmp_path) as tab:
            await tab.go(f"http://127.0.0.1:{port}/console/")
            await tab.run("[...document.querySelectorAll('a')].find(a => a.innerText == 'Drain node 1').click()")
            await tab.shows("form[method=post] button", "Drain the node")
            form = await tab.run("document.querySelector('form[method=post]').outerHTML")
            await tab.run("document.querySelector('form[method=post] button').click()")
            await tab.shows("td", "node 1: to be drained; by 127.0.0.1")
            assert await tab.run("location.pathname") == "/console/events"
            stranger = form.replace('action="', f'action="http://127.0.0.1:{port}')
            (tmp_path / "stranger.html").write_text(f"<!doctype html>{stranger}")
            await tab.go((tmp_path / "stranger.html").as_uri())
            await tab.run("document.querySelector('form').submit()")
            await tab.shows("main", "must come from a page of this console")


async def test_a_page_that_follows_shows_records_as_they_come_and_keeps_its_place(
    served: Served, tmp_path: Path
) -> None:
    await served.create()
    async with opened(tmp_path) as tab:
        # The page does not end, so it is never complete: `go` would wait for that.
        await tab._call(
            "Page.navigate", url=f"http://127.0.0.1:{served.server.http_address[1]}/console/topics/t/messages?tail=on"
        )
        for count in (30, 60):
            await served.publish(*numbered(30, first=count - 30))
            while await tab.run("document.querySelectorAll('tbody tr').length") != count:  # noqa: ASYNC110 # the browser draws
                await asyncio.sleep(0.05)
            await tab.run("document.querySelector('a').focus(); window.mark = 1")
        assert await tab.run("window.mark") == 1, "it is still the same page"
        assert await tab.run("document.activeElement.tagName") == "A"
