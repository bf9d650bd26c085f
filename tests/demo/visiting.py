"""A headless Chromium at the demo, in the words of a visitor."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import until


def browser() -> Any:
    """A headless Chromium."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    # pages that nobody sees are made slow otherwise, which on a busy machine is very slow
    for flag in ("renderer-backgrounding", "backgrounding-occluded-windows", "background-timer-throttling"):
        options.add_argument(f"--disable-{flag}")
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


class Visit:
    """One visitor, with a browser for himself."""

    def __init__(self, driver: Any, address: str, width: int, height: int, dark: bool = False) -> None:
        from selenium.webdriver.common.by import By

        self.css = By.CSS_SELECTOR
        self.driver = driver
        self.size(width, height, dark)
        self.driver.get(address)
        self.until(lambda: "are shown to" in self.text("#state"))
        self.answered("picture")

    def size(self, width: int, height: int, dark: bool = False) -> None:
        about = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", about)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def all(self, selector: str, visible: bool = True) -> list[Any]:
        return [e for e in self.driver.find_elements(self.css, selector) if not visible or e.is_displayed()]

    def text(self, selector: str) -> str:
        # in one go, since the page redraws while it is read
        seen = "[...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
        return str(self.driver.execute_script(f"return {seen}.map(e => e.innerText.trim()).join(' ')", selector))

    def until(self, holds: Callable[[], Any], seconds: float = 60.0) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException

        def there() -> Any:
            # the page redraws while it is read
            with contextlib.suppress(StaleElementReferenceException):
                return holds()

        try:
            return until(there, seconds, every=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}; the page says: {self.text('body')[:3000]}") from None

    def tab(self, name: str) -> None:
        if not (found := [e for e in self.all("button[role=tab]") if e.text == name]):
            # at phone width the last tabs are behind a menu
            self.all(".overflow-menu > button")[0].click()
            found = self.until(lambda: [e for e in self.all(".overflow-dropdown button") if e.text == name])
        found[0].click()
        if name in ("Video", "Layers"):
            self.answered(name.lower())

    def answered(self, kind: str) -> None:
        """Wait for both answers to what was asked last, the example that every visitor is shown included, and their figures."""
        done = f".answers-{kind} .mm-columns:not([data-old]) .mm-column[data-state=done]"
        self.until(lambda: len(self.all(done)) == 2 and self.rows(f".figures-{kind}"), 180)

    def rows(self, selector: str) -> list[list[str]]:
        """The cells of a table that is seen."""
        cells = "[...r.querySelectorAll('th, td')].map(e => e.innerText.trim())"
        rows = f"[...document.querySelectorAll(arguments[0])].filter(r => r.checkVisibility()).map(r => {cells})"
        found = self.driver.execute_script(f"return {rows}", f"{selector} tbody tr")
        return [row for row in found if any(row)]

    def press(self, name: str) -> None:
        # what folds out has an arrow in a second line
        button = self.until(lambda: [e for e in self.all("button") if e.text.split("\n")[0] == name])[0]
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        self.until(button.is_enabled)
        self.forget()
        button.click()

    def forget(self) -> None:
        """Mark the answers that are seen, so that they are not taken for those to come."""
        self.driver.execute_script("document.querySelectorAll('.mm-columns').forEach(e => e.dataset.old = 1)")

    def unnamed(self) -> list[str]:
        """Controls that are seen and that a screen reader has no name for, or one without a letter."""
        self.driver.execute_cdp_cmd("Accessibility.enable", {})
        found = []
        for node in self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]:
            focusable = any(one["name"] == "focusable" for one in node.get("properties", []))
            if node["ignored"] or not focusable or node["role"]["value"] == "RootWebArea":
                continue
            name = node.get("name", {}).get("value", "")
            if not any(letter.isalpha() for letter in name):
                about = self.driver.execute_cdp_cmd("DOM.describeNode", {"backendNodeId": node["backendDOMNodeId"]})
                found.append(
                    f"{node['role']['value']} {name!r} {about['node']['localName']} {about['node']['attributes']}"
                )
        return found

    def focus(self) -> str:
        """What has the focus, as a screen reader names it; empty where nothing has."""
        element = self.driver.switch_to.active_element
        return "" if element.tag_name == "body" else " ".join(str(element.accessible_name).split())

    def keys(self, *pressed: str) -> None:
        """Press keys where the focus is."""
        self.driver.switch_to.active_element.send_keys(*pressed)

    def tab_to(self, name: str) -> list[str]:
        """Press Tab until a control whose name begins so has the focus; returns the names that it passed."""
        from selenium.webdriver.common.keys import Keys

        passed: list[str] = []
        while not (passed and passed[-1].startswith(name)):
            assert len(passed) < 60, f"Tab does not reach {name!r}, but {passed}"
            self.keys(Keys.TAB)
            passed.append(self.focus())
        return passed

    def panel(self) -> Any:
        return self.all("[role=tabpanel]")[0]

    def upload(self, path: Path) -> None:
        """Put a file where the panel takes one, and wait until the server has it."""
        panel = self.panel()
        for clear in panel.find_elements(self.css, "button[aria-label*=Clear], button[aria-label*=Remove]"):
            clear.click()
        field = self.until(lambda: panel.find_elements(self.css, "input[type=file]"))[0]
        field.send_keys(str(path))
        sources = "return [...arguments[0].querySelectorAll('img, video')].map(e => e.src + (e.currentSrc || ''))"
        name = path.name
        self.until(lambda: any(name in source for source in self.driver.execute_script(sources, panel)))

    def example(self, field: str) -> None:
        """The last example of the panel, once its question stands in ``field``."""
        before = self.value(field)
        self.forget()
        self.until(lambda: self.panel().find_elements(self.css, ".mm-thumbs button"))[-1].click()
        self.until(lambda: self.value(field) != before)

    def value(self, selector: str) -> str:
        """What a field holds, whether it is folded away or not."""
        return str(self.all(f"{selector} textarea, {selector} input", visible=False)[0].get_property("value"))

    def put(self, selector: str, text: str) -> None:
        """Text in place of what a field holds, all at once, as pasting does."""
        from selenium.webdriver.common.keys import Keys

        self.all(f"{selector} textarea, {selector} input")[0].send_keys(Keys.CONTROL, "a")
        self.driver.execute_cdp_cmd("Input.insertText", {"text": text})

    def write(self, selector: str, text: str) -> None:
        from selenium.webdriver.common.keys import Keys

        field = self.all(f"{selector} textarea, {selector} input")[0]
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(Keys.DELETE if not text else text)

    def slide(self, label: str, presses: int) -> None:
        """Move a slider by arrow keys, as the keyboard does."""
        from selenium.webdriver.common.keys import Keys

        sliders = f"input[type=range][aria-label*='{label}']"
        field = self.until(lambda: self.all(sliders))[0]
        field.send_keys((Keys.ARROW_RIGHT if presses > 0 else Keys.ARROW_LEFT) * abs(presses))

    def choose(self, name: str) -> None:
        """A recipe of the list, by typing its name."""
        from selenium.webdriver.common.keys import Keys

        field = self.all("input[role=combobox]")[0]
        field.click()
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(name)
        option = self.until(lambda: [e for e in self.all("[role=option]") if f"{name} ·" in e.text])[0]
        option.click()

    def leave(self) -> None:
        self.driver.get("about:blank")


def screenshots(address: str, folder: Path) -> None:
    """The pictures of ``demo/screenshots``, from a demo with the shipped models that runs at ``address``: each tab at 1280 and
    at 390 pixels, light and dark. The colours are reduced to a palette, which keeps them small."""
    driver = browser()
    try:
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            # Gradio takes light or dark from the browser when the page is opened
            page = Visit(driver, address, width, 900, dark)
            for tab, kind in (
                ("Picture", "picture"), ("Video", "video"), ("Layers", "layers"), ("Compare recipes", "compare"),
                ("Stream", "stream"),
            ):  # fmt: skip
                _shoot(page, tab, kind, width, dark, folder)
    finally:
        driver.quit()


def _shoot(page: Visit, tab: str, kind: str, width: int, dark: bool, folder: Path) -> None:
    from io import BytesIO

    from PIL import Image

    page.tab(tab)
    if kind == "stream":

        def frames() -> int:
            return int(page.text(".memory-stream .mm-say").partition(" ")[0] or 0)

        page.press("Start")
        page.until(lambda: frames() >= 8, 180)
        page.press("Ask now")
        page.until(lambda: page.all(".answers-stream .mm-asked"), 180)
        page.until(lambda: frames() >= 40, 180)
        page.press("Stop")
    elif kind == "compare":
        page.press("Compare")
        page.until(lambda: page.all(".drawing-compare img"), 180)
    page.size(width, page.driver.execute_script("return document.documentElement.scrollHeight"), dark)
    page.driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    time.sleep(2)  # not to wait for anything a test needs: what fades on the page has faded in the picture
    shot = Image.open(BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
    name = f"{kind}-{width}{'-dark' * dark}.png"
    shot.quantize(128, kmeans=1, dither=Image.Dither.NONE).save(folder / name, optimize=True)
    page.size(width, 900, dark)


if __name__ == "__main__":
    # python tests/demo/visiting.py http://127.0.0.1:7860/ demo/screenshots
    screenshots(sys.argv[1], Path(sys.argv[2]))
