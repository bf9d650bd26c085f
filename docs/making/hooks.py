"""What the builder of the site asks for: pages that stand elsewhere in the repository, and pages that are made.

README, CONTRIBUTING, CHANGELOG and the pages about benchmarks and training are shown as they are, and so are notebooks. A page
for every method and the list of the API are made from the code. Links are those that work in the repository; here they are led
to the page of the site, and what is no page (a script, a file of results) is copied beside it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import cells
import kept_pictures
import method_pages

import mmaccel

ROOT = Path(__file__).parents[2]
#: pages that stand elsewhere, and where they are on the site
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "results/benchmarks.md",
    "training/README.md": "results/training.md",
    **{f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))},
}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)


def place(target: str) -> str:
    """Where a file of the repository is on the site."""
    if target in ELSEWHERE:
        return ELSEWHERE[target]
    return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}"


def led(text: str, source: str) -> tuple[str, set[str]]:
    """The text of a page of the repository with its links led to the site, and the files that they name."""
    named: set[str] = set()
    here = os.path.dirname(place(source))

    def lead(found: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), found[2]))
        named.add(target)
        return f"{found[1]}{os.path.relpath(place(target), here or '.')}{found[3] or ''}{found[4]}"

    parts = FENCE.split(text)
    return "".join(part if at % 2 else LINK.sub(lead, part) for at, part in enumerate(parts)), named


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation with a page for every method."""
    for entry in config.nav or []:
        if "Methods" in entry:
            for title, names in method_pages.by_site().items():
                entry["Methods"].append({title: [{name: f"methods/{name}.md"} for name in names]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what does not stand below ``docs``."""

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    linked: set[str] = set()
    for source in [file.src_uri for file in files.documentation_pages()]:
        linked |= led((ROOT / "docs" / source).read_text(encoding="utf-8"), f"docs/{source}")[1]
    for source, uri in ELSEWHERE.items():
        if source.endswith(".ipynb"):
            text, shown = cells.page(ROOT / source)
            for name, content in shown.items():
                add(f"notebooks/{name}", content)
            files.append(File.generated(config, f"notebooks/{Path(source).name}", abs_src_path=str(ROOT / source)))
            text = text.replace("\n", f"\n\n[The notebook]({Path(source).name}), to run it yourself.\n", 1)
            # pictures and the notebook itself lie beside the page
            text, named = re.sub(r"\]\((\w+)\.ipynb\)(?!, to run)", r"](\1.md)", text), set()
        else:
            text, named = led((ROOT / source).read_text(encoding="utf-8"), source)
        linked |= named
        add(uri, text)
    for target in sorted(linked):
        known = target in ELSEWHERE or files.get_file_from_path(place(target)) is not None
        if not known and (ROOT / target).is_file():
            files.append(File.generated(config, place(target), abs_src_path=str(ROOT / target)))
    made: dict[str, dict[str, tuple[str, str]]] = {}
    for name, kind, content, words in kept_pictures.pictures(list(method_pages.own())):
        made.setdefault(name, {})[kind] = (f"{name}-{kind}.webp", words)
        add(f"methods/{name}-{kind}.webp", content)
    for name in method_pages.own():
        add(f"methods/{name}.md", method_pages.page(name, made.get(name, {})))
    add("api/index.md", api())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """Lead the links of pages that stand below ``docs``, and those of the table of methods to their pages."""
    source = ROOT / "docs" / page.file.src_uri
    if page.file.generated_by is None and source.is_file():
        markdown = led(markdown, f"docs/{page.file.src_uri}")[0]
    if page.file.src_uri == "methods/index.md":
        known = method_pages.own()

        def named(found: re.Match[str]) -> str:
            return f"| [{found[1]}]({found[1]}.md) |" if found[1] in known else found[0]

        markdown = re.sub(r"^\| ([\w-]+) \|", named, markdown, flags=re.M)
    return markdown


def api() -> str:
    """The names of the package, from their docstrings."""
    parts = [
        "# Python",
        "What `import mmaccel` offers. Methods have [pages of their own](../methods/index.md).",
        "",
        "",
    ]
    for name in mmaccel.__all__:
        found = getattr(mmaccel, name)
        if hasattr(found, "__qualname__") and found.__module__.startswith("mmaccel"):
            parts.append(f"::: {found.__module__}.{found.__qualname__}\n")
    return "\n".join(parts)
