"""A real Chromium on a dashboard, for the tests of engines."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = "/usr/bin/chromium"
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PATIENCE_MS = 30_000.0
WRITES_IMAGES = os.environ.get("IMAGES") == "write"
"""Whether the pictures of docs/ are made anew: IMAGES=write make test-engines."""

SERIOUS = ("serious", "critical")


class Opened:
    """A page of Chromium, and what it complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector("[data-state=live]")

    def show(self, view: str) -> None:
        """Show a view, and wait until it is drawn."""
        self.page.click(f"nav a[href='#/{view}']")
        self.page.wait_for_selector(f"nav a[href='#/{view}'][aria-current=page]")
        self.page.wait_for_selector("#view h1")

    def text(self) -> str:
        return str(self.page.inner_text("#view"))

    def wait_for(self, text: str) -> None:
        """Wait until the view shows a text."""
        try:
            self.page.wait_for_function(
                "text => document.getElementById('view').innerText.includes(text)", arg=text
            )
        except Exception as error:
            shown = self.page.inner_text("body")
            raise AssertionError(f"no {text!r} in {shown[:3000]!r}; {self.problems}") from error

    def widest(self) -> int:
        """The pixels that the page is wider than its window."""
        widths = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(self.page.evaluate(widths))

    def faults(self) -> list[str]:
        """What axe finds in the view that is serious."""
        from axe_playwright_python.sync_playwright import Axe

        violations = Axe().run(self.page).response["violations"]
        return [
            f"{fault['id']}: {fault['nodes'][0]['html'][:200]}"
            for fault in violations
            if fault["impact"] in SERIOUS
        ]

    def picture(self, name: str, height: int) -> None:
        """Write a picture for docs/, if the pictures are made anew."""
        if WRITES_IMAGES:
            IMAGES.mkdir(exist_ok=True)
            clip = {"x": 0, "y": 0, "width": 1280, "height": height}
            self.page.screenshot(path=IMAGES / f"{name}.png", clip=clip)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Return a context manager that yields Debian's Chromium, or skips the test without it."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs pip install zmqdist[engines]"
    )
    if shutil.which(CHROMIUM) is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with contextlib.closing(browser):
            yield browser


@contextlib.contextmanager
def opened(browser: Any, width: int = 1280, scheme: str = "light") -> Iterator[Opened]:
    """Return a context manager that yields a new page of a browser, without any memory of others."""
    viewport = {"width": width, "height": 800}
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    with contextlib.closing(context):
        yield Opened(context.new_page())
