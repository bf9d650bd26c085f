"""The demo on a free port, and a headless Chromium to visit it. What cannot be installed is skipped with its reason."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zoo
from PIL import Image
from visiting import Visit, browser

from mmaccel.cli import ask
from mmaccel.suite import make_item, render_clip, write_video

OPTIONS = argparse.Namespace(model=None, device="cpu", dtype="auto", attn=None, trust_remote_code=False)


@pytest.fixture(scope="session")
def tiny_video_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that takes clips: the tiny one with random weights, whatever else is shipped."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen-vl"
    zoo.model("qwen2_5_vl").save_pretrained(folder)
    zoo.processor("qwen2_5_vl").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A real PNG and mp4 with questions, and files that must be refused."""
    folder = tmp_path_factory.mktemp("files")
    found = SimpleNamespace(
        folder=folder, png=folder / "scene.png", other=folder / "other.png", mp4=folder / "clip.mp4"
    )
    items = [make_item("colour", "test", number) for number in (3, 5)]
    for path, item in zip((found.png, found.other), items, strict=True):
        Image.fromarray(item.pictures(224)[0]).save(path)
    found.question, found.other_question = (item.turns[-1].question for item in items)
    found.answer, found.other_answer = (item.answer for item in items)
    if find_spec("av"):
        moving = make_item("order", "test", 2, frames=16)
        write_video(render_clip(moving.clip, 112), found.mp4, moving.clip.fps)
        found.clip_question = moving.turns[-1].question
    found.broken_mp4 = folder / "broken.mp4"
    found.broken_mp4.write_bytes(b"\0\0\0\x20ftypisom" + bytes(range(256)) * 8)
    found.broken_png = folder / "broken.png"
    found.broken_png.write_bytes(found.png.read_bytes()[:2000])
    found.huge = folder / "huge.png"  # 200 megapixels of nothing in a small file
    Image.new("1", (20_000, 10_000)).save(found.huge)
    found.text = folder / "notes.txt"
    found.text.write_text("no picture")
    return found


@pytest.fixture(scope="session")
def gradio() -> None:
    if find_spec("gradio") is None:
        pytest.skip("Gradio is not installed: pip install 'mmaccel[demo]'")


@pytest.fixture(scope="session")
def site(gradio: None, tiny_video_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The demo with its models loaded; ``address``, ``house``, and the temporary ``folder`` of the server."""
    from mmaccel_demo import serve
    from mmaccel_demo.engine import House

    with pytest.MonkeyPatch.context() as patch, serve.workplace() as folder:
        patch.setattr(ask, "SHIPPED_VIDEO", tiny_video_model)
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        house = House(OPTIONS)
        house.load()
        blocks, address = serve.launch(house, folder, server_name="127.0.0.1")
        try:
            yield SimpleNamespace(address=address, house=house, folder=folder, started_in=Path.cwd(), blocks=blocks)
        finally:
            blocks.close(verbose=False)


@pytest.fixture(scope="session")
def idle() -> Iterator[list[Any]]:
    """Browsers that nobody uses; starting one takes long."""
    found: list[Any] = []
    yield found
    for one in found:
        one.quit()


@pytest.fixture
def visit(site: SimpleNamespace, idle: list[Any]) -> Iterator[Callable[..., Visit]]:
    """Open the page: ``visit()``, or ``visit(390, 844)``."""
    if find_spec("selenium") is None:
        pytest.skip("selenium is not installed: pip install selenium")
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install chromium chromium-driver")
    visits: list[Visit] = []

    def start(width: int = 1280, height: int = 1000, dark: bool = False) -> Visit:
        visits.append(Visit(idle.pop() if idle else browser(), site.address, width, height, dark))
        return visits[-1]

    yield start
    for one in visits:
        one.leave()
        idle.append(one.driver)
