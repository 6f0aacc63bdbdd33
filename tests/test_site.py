"""The documentation as a site: in a browser without network the search finds pages, nothing is wider than a phone, and no link
is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, chromium

ROOT = Path(__file__).parents[1]
PHONE = 390  # CSS pixels
FOUND = {"deepspeed": "deepspeed.html", "attention_mask": "sft.html", "straggler": "guide"}
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it, where any warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.mark.parametrize("word", FOUND)
def test_the_search_finds_a_word_without_network(site: Path, tab: Page, word: str) -> None:
    tab.requests.clear()
    tab.open(site / "index.html")
    tab.do("Emulation.setFocusEmulationEnabled", enabled=True)
    tab.evaluate("document.querySelector('input.md-search__input').focus()")
    tab.do("Input.insertText", text=word)
    tab.do("Input.dispatchKeyEvent", type="keyUp", key="Shift")
    links = "[...document.querySelectorAll('a.md-search-result__link')].map(link => link.getAttribute('href'))"
    assert tab.wait_for(f"{links}.length > 0"), tab.complaints
    assert any(FOUND[word] in link for link in tab.evaluate(links)), tab.evaluate(links)
    assert [url for url in tab.requests if not url.startswith(("file://", "data:", "blob:"))] == []


def test_pages_fit_a_phone_and_ask_nobody(site: Path, tab: Page) -> None:
    """Wide tables and code scroll by themselves."""
    pages = [*site.glob("*.html"), *site.glob("jobs/*.html"), *site.glob("guide/*.html")]
    assert len(pages) > 35
    tab.requests.clear()
    tab.complaints.clear()
    too_wide = []
    for page in pages:
        if page.name == "404.html":  # for a server, which knows where the site begins
            continue
        tab.open(page, width=PHONE)
        if (width := tab.evaluate("document.documentElement.scrollWidth")) > PHONE:
            too_wide.append((page.name, width))
    assert too_wide == []
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith(("file://", "data:", "blob:"))] == []


def test_links_lead_to_pages_that_were_built(site: Path, tab: Page) -> None:
    """As the browser resolves them, with their anchors."""
    targets: dict[str, set[str]] = {}
    anchors: dict[str, set[str]] = {}
    for page in [
        *site.glob("*.html"),
        *site.glob("jobs/*.html"),
        *site.glob("guide/*.html"),
        *site.glob("decisions/*.html"),
    ]:
        if page.name == "404.html":
            continue
        tab.open(page)
        url = page.resolve().as_uri()
        targets[url] = set(tab.evaluate("[...document.querySelectorAll('article a[href]')].map(link => link.href)"))
        anchors[url] = set(tab.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)"))
    broken = []
    for shown, links in targets.items():
        for link in links:
            place, _, anchor = link.partition("#")
            if not place.startswith("file://"):
                assert place.startswith("https://"), (shown, link)
            elif not Path(place.removeprefix("file://")).is_file() or (
                anchor and place in anchors and anchor not in anchors[place]
            ):
                broken.append((shown.rpartition("/")[2], link))
    assert broken == []
