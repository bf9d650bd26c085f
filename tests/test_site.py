"""The built site: links and anchors, nothing from another host, examples of the API, and in a browser widths and the search."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from visiting import browser

ROOT = Path(__file__).parent.parent
#: one column a family, more than any screen has; the table is folded
WIDE = "families.html"


class Page(HTMLParser):
    """The addresses that a page loads and links to, its anchors, and its text outside of code blocks."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self._code = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        if tag != "a" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads += [found[name] for name in ("src", "href") if name in found]
        self._code += tag in ("pre", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("pre", "script", "style")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._code else data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'mmaccel[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {
        path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }


def dead(pages: dict[str, Page], site: Path, page: str, link: str) -> bool:
    """Whether a link of a page leads nowhere on the site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return parts.scheme not in ("http", "https", "mailto")
    target = (site / page).parent / unquote(parts.path) if parts.path else site / page
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file() or not target.resolve().is_relative_to(site.resolve()):
        return True
    known = pages.get(target.resolve().relative_to(site.resolve()).as_posix())
    return bool(parts.fragment) and known is not None and unquote(parts.fragment) not in known.anchors


def test_links_and_anchors_lead_somewhere(pages: dict[str, Page], site: Path) -> None:
    assert len(pages) > 150
    # the page for wrong addresses has links from the root
    found = [
        f"{name}: {link}"
        for name, page in pages.items()
        for link in (*page.links, *page.loads)
        if name != "404.html" and dead(pages, site, name, link)
    ]
    assert not found, "\n".join(found)
    page = "results/index.html"
    assert dead(pages, site, page, "#nowhere") and dead(pages, site, page, "nowhere.html")
    assert not dead(pages, site, page, "clips.html#the-shipped-models")


def test_nothing_is_loaded_from_another_host(pages: dict[str, Page], site: Path) -> None:
    """Fonts, scripts, styles, pictures: everything comes with the site."""
    found = [f"{name}: {load}" for name, page in pages.items() for load in page.loads if urlsplit(load).netloc]
    for style in site.rglob("*.css"):
        found += re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\s]*", style.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


def test_examples_of_the_api_are_code(pages: dict[str, Page], site: Path) -> None:
    for name in ("api/index.html", "api/methods.html", "api/programs.html"):
        html = (site / name).read_text(encoding="utf-8")
        assert "<blockquote" not in html and ">>>" not in pages[name].text and "```" not in pages[name].text, name
        assert "<strong>Examples</strong>" not in html or 'class="gp"' in html, name
    assert (site / "api/index.html").read_text(encoding="utf-8").count('class="gp"') > 40


def test_the_index_of_the_search_has_every_question(site: Path) -> None:
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    for name in ("one-picture", "screenshots", "many-users"):
        assert f'"results/{name}.html"' in text


# ---------------------------------------------------------------------------------------------------------- in a browser
@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    if find_spec("selenium") is None:
        pytest.skip("selenium is not installed: pip install selenium")
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install chromium chromium-driver")
    found = browser()
    yield found
    found.quit()


#: with everything unfolded: how far the page is wider than the window, tables that are scrolled, what else sticks out, and what
#: is loaded from elsewhere
WIDTHS = """
for (const fold of document.querySelectorAll("details")) fold.open = true
const wide = document.documentElement.clientWidth
const inside = (e) => {
  for (let p = e.parentElement; p && p !== document.body; p = p.parentElement)
    if (getComputedStyle(p).overflowX !== "visible") return true
  return false
}
const seen = [...document.querySelectorAll(".md-content *")].filter((e) => e.checkVisibility())
return [
  document.documentElement.scrollWidth - wide,
  [...document.querySelectorAll(".md-typeset__scrollwrap")]
    .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.innerText.slice(0, 60)),
  seen.filter((e) => e.getBoundingClientRect().right > wide + 1 && !inside(e)).map((e) => e.outerHTML.slice(0, 90)),
  performance.getEntriesByType("resource").map((e) => e.name).filter((name) => !/^(file|data|blob):/.test(name)),
]
"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit(width: int, driver: Any, pages: dict[str, Page], site: Path) -> None:
    """At 1,280 pixels no table has to be scrolled; at 390 tables may be, pages not."""
    about = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", about)
    found = []
    for name in pages:
        driver.get((site / name).as_uri())
        beyond, tables, out, loaded = driver.execute_script(WIDTHS)
        told = {"the page is too wide": max(beyond, 0), "sticks out": out, "is loaded": loaded}
        told["tables are scrolled"] = tables if width > 1000 and name != WIDE else []
        found += [f"{name}: {what}: {which}" for what, which in told.items() if which]
    assert not found, "\n".join(found)


@pytest.mark.browser
@pytest.mark.parametrize("opened", ["from a folder", "from a server"])
def test_the_search_finds_pages(opened: str, driver: Any, site: Path) -> None:
    from selenium.webdriver.common.by import By
    from waiting import until

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = site.as_uri() if opened == "from a folder" else f"http://127.0.0.1:{server.server_port}"
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.get(f"{address}/index.html")
        driver.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys("screenshots")
        links = "return [...document.querySelectorAll('.md-search-result__link')].map((e) => e.href)"
        until(lambda: any("results/screenshots.html" in link for link in driver.execute_script(links)), 60)
        server.shutdown()
