"""README and documentation: every Python block runs on the shipped models, every command parses, every link leads somewhere.

Blocks of a page run in order in one namespace, in a folder with pictures and films of the generated suite. Names of models on
the hub are replaced by shipped folders. A ``text`` block right behind a Python block is what it prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cells
import docstrings
import front_figure
import kept_pictures
import method_pages
import numpy as np
import pytest
from films import film
from PIL import Image
from tail import few

from mmaccel import cli
from mmaccel.method import imported
from mmaccel.suite import Item, make_item

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "mmaccel" / "models"
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "training/*.md")
    for page in ROOT.glob(pattern)
)
#: what stands in for a model of the hub
SHIPPED = {
    "Qwen/Qwen2.5-VL-3B-Instruct": MODELS / "mini-qwen-vl",
    "llava-hf/llava-1.5-7b-hf": MODELS / "mini-llava",
    "hf-hub:laion/CLIP-ViT-L-14-laion2B-s32B-b82K": f"local-dir:{MODELS / 'mini-clip'}",
    "clip-vit-large-patch14-336": MODELS / "mini-clip",
    "local-dir:mmaccel/models/mini-clip": f"local-dir:{MODELS / 'mini-clip'}",
}
#: the page whose blocks are clients of a server
SERVED = "docs/guides/serve.md"
#: programs of others that pages start; ours are looked into
OTHERS = {"docker", "ruff", "mypy", "lmms-eval", "mkdocs", "vllm"}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of every block of a page."""
    return [(found[2], found[3]) for found in FENCE.finditer(text_of(page))]


def of_language(*languages: str) -> list[str]:
    return [page for page in PAGES if any(language in languages for language, _ in blocks(page))]


# ------------------------------------------------------------------------------------------------------------- Python


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages name."""
    picture(make_item("count", "test", 4), 0, tmp_path / "photo.png")
    two = make_item("comparison", "test", 1)
    for shown, name in enumerate(("before.png", "after.png")):
        picture(two, shown, tmp_path / name)
    clip = make_item("needle", "test", 1).frames(112)
    assert clip is not None
    film(tmp_path / "talk.mp4", len(clip), size=(112, 112), picture=lambda at, *_: np.asarray(clip[at]))
    (tmp_path / "broken.mp4").write_text("no film\n")
    asked = {"question": "what colour is the circle ?", "answer": "orange"}
    (tmp_path / "questions.jsonl").write_text(json.dumps({"image": "photo.png", **asked}) + "\n")
    (tmp_path / "videos.jsonl").write_text(json.dumps({"video": "talk.mp4", **asked}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def picture(item: Item, shown: int, path: Path) -> None:
    Image.fromarray(item.pictures()[shown]).save(path)


def offline(code: str) -> str:
    """The code with every quoted name of a model on the hub replaced by a shipped one."""
    for name, shipped in SHIPPED.items():
        code = code.replace(f'"{name}"', repr(str(shipped)))
    return code


def parts(page: str) -> Iterator[tuple[str, str | None]]:
    """Python blocks that need no server, with what stands behind them as their output."""
    listed = blocks(page)
    for at, (language, code) in enumerate(listed):
        elsewhere = "gradio_client" in code or '"smol-pages"' in code or page == SERVED
        if language == "python" and not elsewhere:
            # tests/demo, tests/serve and tests/test_pages.py run the others
            behind = listed[at + 1] if at + 1 < len(listed) else ("", "")
            yield code, behind[1] if behind[0] == "text" else None


def timeless(text: str) -> str:
    """Without how long something took, which is not said where it took too short."""
    return re.sub(r", \w+ [\d.,]+ (?:ms|s)\b", "", text).strip()


@pytest.mark.parametrize(
    "page",
    # its search takes as long as all other pages
    [
        pytest.param(page, marks=pytest.mark.full if page == "docs/guides/tune.md" else ())
        for page in of_language("python")
    ],
)
def test_python_blocks_run(page: str, place: Path, fresh_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # dataclasses look their module up
    made = ModuleType("a_page")
    monkeypatch.setitem(sys.modules, "a_page", made)
    for number, (code, printed) in enumerate(parts(page), 1):
        heard = io.StringIO()
        with contextlib.redirect_stdout(heard):
            exec(compile(offline(code), f"{page}, block {number}", "exec"), vars(made))
        if printed is not None:
            assert timeless(heard.getvalue()) == timeless(printed), f"{page}, block {number}"


def test_models_of_the_hub_are_replaced() -> None:
    """What no folder stands for would be looked for on the network, and fail where there is none."""
    code = "".join(code for page in PAGES for code, _ in parts(page))
    assert all(f'"{name}"' in code for name in SHIPPED), "a replacement that no page needs"
    named = re.findall(r'from_pretrained\(\s*"([^"]+)"|^name = "([^"]+)"', code, re.M)
    assert named and {a or b for a, b in named} <= set(SHIPPED)


NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("name", few(NOTEBOOKS, quick=["accelerate", "stream"]))
def test_notebooks_show_what_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for figures, which may differ from machine to machine."""
    path = ROOT / "notebooks" / f"{name}.ipynb"
    monkeypatch.chdir(path.parent)
    for cell, outputs in cells.run(path):
        now, then = (re.sub(r"[\d,.]+", "0", cells.text_of(found)) for found in (outputs, cell["outputs"]))
        assert now.split() == then.split(), cell["id"]


# -------------------------------------------------------------------------------------------------------------- shell


def commands(script: str) -> Iterator[list[str]]:
    """The words of every command; comments, assignments and continued lines as a shell takes them."""
    for line in script.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|", line):
            words = shlex.split(part, comments=True)
            if words:
                yield words


def check_ours(words: list[str]) -> None:
    """A command line of mmaccel is one that would be run."""
    with pytest.MonkeyPatch.context() as patch:
        for module in cli.commands().values():
            patch.setattr(module, "run", functools.wraps(module.run)(lambda *_, **__: 0))
        patch.setattr(cli.needs, "require", lambda *_: None)  # what is not installed here
        patch.setattr(imported, "import_methods", lambda file: None)  # its methods would stay
        try:
            status: Any = cli.main(words)
        except SystemExit as stop:
            status = stop.code
    assert status == 0, f"mmaccel does not take {shlex.join(words)}"


def check_script(source: Path, words: list[str]) -> None:
    """Options of a script are among those that it declares."""
    assert source.is_file(), f"there is no {source}"
    text = source.read_text(encoding="utf-8")
    for word in words:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in text, f"{source.name} has no option {word}"


def check_python(words: list[str]) -> None:
    """``python FILE``, ``python -m MODULE``, and what ``pip install`` is told to install."""
    if words[0] != "-m":
        return check_script(ROOT / words[0], words[1:])
    module, rest = words[1], words[2:]
    if module == "mmaccel":
        return check_ours(rest)
    if module == "pip":
        wanted = re.search(r"\[([\w,-]+)\]", " ".join(rest))
        known = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
        assert rest[0] == "install" and (wanted is None or set(wanted[1].split(",")) <= set(known)), rest
    elif module == "pytest":
        given = [word for word in rest if "/" in word]
        assert all((ROOT / word).exists() for word in given), given
    elif module not in ("json.tool", "venv"):
        check_script((ROOT / module.replace(".", "/")).with_suffix(".py"), rest)


def check(words: list[str]) -> None:
    """One command of a page."""
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
        if not words:
            return
    program, rest = words[0], words[1:]
    if program == "mmaccel":
        check_ours(rest)
    elif program.startswith("python"):
        check_python(rest)
    elif program not in OTHERS:
        assert os.access(ROOT / program, os.X_OK), f"what is {program}?"


@pytest.mark.parametrize("page", of_language("bash"))
def test_commands_parse(page: str) -> None:
    for language, script in blocks(page):
        for words in commands(script) if language == "bash" else ():
            check(words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("mmaccel ask --no-such-option a.png b", "does not take"),
        ("mmaccel no-such-command", "does not take"),
        ("python -m mmaccel eval --retian 0.5", "does not take"),
        ("python benchmarks/decode.py --no-such-option", "has no option"),
        ("python -m training.train --no-such-option", "has no option"),
        ("python benchmarks/no_such_file.py", "there is no"),
        ("python -m pip install .[no-such-extra]", "install"),
        ("no-such-program", "what is"),
    ],
)
def test_wrong_commands_do_not(words: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check(shlex.split(words))


@pytest.mark.parametrize("page", of_language("json", "toml"))
def test_data_is_well_formed(page: str) -> None:
    readers: dict[str, Callable[[str], Any]] = {
        "json": lambda text: [json.loads(line) for line in text.splitlines()],
        "toml": tomllib.loads,
    }
    for language, text in blocks(page):
        if language in readers:
            readers[language](text)


# ------------------------------------------------------------------------------------------------------ made from code


def test_every_method_has_a_page() -> None:
    """With its options, all of them with a meaning, its paper and its families."""
    for name, own in method_pages.own().items():
        page = method_pages.page(name, {"image": ("kept.webp", "1 of 2 tokens")})
        listed = method_pages.methods().get(name)
        for field in dataclasses.fields(listed) if listed else ():
            meaning = re.search(rf"^\| `{field.name}` \| .* \| (.*) \|$", page, re.M)
            assert meaning and len(meaning[1]) > 4, f"the docstring of {name} does not say what {field.name} is"
        assert page.startswith(f"# {name}\n") and "(kept.webp)" in page
        # the table gives no method what it needs beside the model, and says what that is
        assert re.search("runs|needs .*; give ", page.split("## Families")[1]), name
        assert ("arxiv.org" in page) == ("arXiv" in (listed.paper if listed else own.paper)), name


def test_figures_reach_the_pages() -> None:
    """Each file of results that pages read."""
    page = method_pages.page("divprune", {})
    assert all(f"[{source}]" in page for source in method_pages.COMPARED)
    (row,) = [row for row in method_pages.record("prefill-cpu")["prefill"] if row["recipe"] == "divprune"]
    assert f"is {row['speedup']:.1f} times as fast" in page and " ms of 576" in page and "bare" in page
    assert "## Cost\n\n- Choosing" in page and "A decode step launches" in method_pages.page("snapkv", {})


def test_pages_say_what_both_grounds_say() -> None:
    """Small models and a real language model: figures of their files, or that there are none."""
    rows = method_pages.record("pages")["rows"]
    pairs = [(kind["right"], kind["asked"]) for kind in rows["kvpress snapkv:0.1"]["kinds"].values()]
    right, asked = (sum(pair[which] for pair in pairs) for which in (0, 1))
    small, real = method_pages.accuracy("snapkv").split("### A real language model\n\n")
    same = method_pages.record("answers-pictures-deep")["rows"]["snapkv:0.1"]["kept"]
    assert f"| one picture | mini-llava-deep | 10% | {sum(same) / len(same):.1%} | {len(same)} |" in small
    pictures, documents = (method_pages.record(f"answers-{kind}")["rows"] for kind in ("pictures-smol", "documents"))
    same = pictures["snapkv:0.1"]["kept"]
    assert f"| one picture | mini-smol | 10% | {sum(same) / len(same):.1%} | {len(same)} |" in real
    assert "| a document | mini-smol |" in method_pages.accuracy("keydiff") and "mini-smol" not in small
    lines = [line.split(" | ") for line in method_pages.pages_read("snapkv").splitlines() if line.startswith("| ")]
    at = lines[0].index("kvpress snapkv 10% |")
    assert [line[at].removesuffix(" |") for line in lines[1:]] == [
        f"{right / asked:.1%} of {asked}",
        *(f"{count} of {of}" for count, of in pairs),
    ]
    assert real.startswith("**snapkv at 25% was right in") and "**document at 10% kept" in method_pages.accuracy(
        "document"
    )
    assert "**" not in method_pages.accuracy("capkv")
    for name in method_pages.own():
        small, real = method_pages.accuracy(name).split("### A real language model")
        read = method_pages.pages_read(name)
        assert ("\n| " in f"\n{read}") == any(title.partition(":")[0] == name for title in rows), name
        assert ("\n| " in f"\n{read}") != ("Not measured on" in read) and real.endswith(read), name
        measured = any(title.partition(":")[0] == name for title in (*pictures, *documents) if "+" not in title)
        assert ("| mini-smol |" in real) == measured, name
        assert ("\n| " in small) != ("Not measured yet" in small), name


def test_docstrings_become_markdown() -> None:
    text = """One :class:`~a.B` of ``x``.

    Parameters
    ----------
    one, *two : what it is,
        at length.

    Raises
    ------
    MmaccelError
        If not.

    Examples
    --------
    >>> for name in ("a", "b"):
    ...     print(f"{name} : ``1``")
    a : ``1``

    >>> both

    Then go on.
    """
    assert docstrings.markdown(text) == (
        "One `B` of `x`.\n\n**Parameters**\n\n- `one`, `*two`: what it is,\n  at length.\n\n"
        "**Raises**\n\n- `MmaccelError`: \n  If not.\n\n**Examples**\n\n"
        '```pycon\n>>> for name in ("a", "b"):\n...     print(f"{name} : ``1``")\na : ``1``\n```\n\n'
        "```pycon\n>>> both\n```\n\nThen go on."
    )


@pytest.mark.parametrize(("kind", "name"), [("image", "divprune"), ("video", "pool"), ("image", "promptdistill")])
def test_pictures_of_what_is_kept(kind: str, name: str) -> None:
    model = {"image": "mini-llava", "video": "mini-qwen-vl"}[kind]
    drawn = kept_pictures.Shown(model, kind).drawn(name)
    assert drawn is not None
    content, words = drawn
    with Image.open(io.BytesIO(content)) as sheet:
        assert sheet.format == "WEBP" and sheet.width > sheet.height and len(content) < 1e5
    kept, whole = map(int, re.findall(r"\d+", words))
    assert 0 < kept <= 0.25 * whole and ("last layer" in words) == (name == "promptdistill")


# -------------------------------------------------------------------------------------------------------------- links


def anchors(page: str) -> set[str]:
    """Of headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for found in re.finditer(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        where, _, anchor = found[1].partition("#")
        if re.match(r"https?:|mailto:", where):
            continue
        target = (ROOT / page).parent / where if where else ROOT / page
        assert target.is_file(), f"{page} points to {found[1]}"
        if anchor:
            named = target.resolve().relative_to(ROOT).as_posix()
            assert anchor in anchors(named), f"{page} points to {found[1]}"


# ------------------------------------------------------------------------------------------------------------- README


def test_readme_is_a_page() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 150 and sum(line.startswith("![") for line in lines) == 1
    two = [
        'python -m pip install ".[video]" && mmaccel quickstart',
        'python -m pip install ".[test]" && python -m pytest',
    ]
    assert [line for line in lines if "pip install" in line and "&&" in line][:2] == two


def test_the_figure_of_the_readme_shows_what_was_measured(tmp_path: Path) -> None:
    """It has what is gained and what it costs, and the sentence that describes it has its figures."""
    shown = front_figure.bars()
    assert len(shown) >= 5 and all(bar.low < bar.kept < bar.high and bar.speedup > 1 for bar in shown)
    best, counts = shown[0], sorted({bar.questions for bar in shown})
    text = " ".join(text_of("README.md").split())
    said = f"{best.recipe} reads the prompt {best.speedup:.1f} times as fast and keeps {100 * best.kept:.0f} % of the answers]"
    assert said in text and f"to {counts[0]} to {counts[-1]} questions" in text
    tokens = {row["visual_tokens"] for row in method_pages.record(front_figure.SPEED)["prefill"]}
    assert all(f"{count:,} visual tokens" in text for count in tokens)
    front_figure.draw(tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as drawn, Image.open(ROOT / "docs" / "gain-and-cost.png") as published:
        assert drawn.size == published.size


def test_every_page_of_the_documentation_is_reached_from_the_readme() -> None:
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            for where in re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", text_of(page)):
                if not where.startswith("http"):
                    waiting.append(((ROOT / page).parent / where).resolve().relative_to(ROOT).as_posix())
    assert set(PAGES) <= reached
