"""Servers, and what they are asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from clients import clip, data_url, picture, serving, user
from PIL import Image

from mmaccel.media import untrusted
from mmaccel.media.files import Prompt
from mmaccel.suite import make_item, render_clip, write_video


def _serve() -> Iterator[Callable[..., SimpleNamespace]]:
    """:func:`serving` for as long as a test, or a module of them, runs."""
    pytest.importorskip("openai", reason="the client of OpenAI is not installed: pip install '.[test]'")
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(serving(*args, **options))


serve = pytest.fixture(_serve, name="serve")
serve_module = pytest.fixture(_serve, scope="module", name="serve_module")


@pytest.fixture(scope="session")
def things(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Pictures and a clip as files, and questions about them: ``cases`` of the messages, and of the same as a prompt."""
    folder = tmp_path_factory.mktemp("things")
    one, two, turns = (make_item(task, "test", 3) for task in ("colour", "comparison", "turns"))
    film = make_item("order", "test", 2, frames=16)
    found = SimpleNamespace(folder=folder, png=folder / "one.png", mp4=folder / "film.mp4", item=one)
    paths = {"one": [found.png], "two": [folder / f"{n}.png" for n in "ab"], "turns": [folder / "turns.png"]}
    for item, of in ((one, "one"), (two, "two"), (turns, "turns")):
        for pixels, path in zip(item.pictures(112), paths[of], strict=True):
            Image.fromarray(pixels).save(path)
    write_video(render_clip(film.clip, 112), found.mp4, film.clip.fps)
    shown = {name: [picture(data_url(path)) for path in of] for name, of in paths.items()}
    pictures = {name: tuple(untrusted.picture(path) for path in of) for name, of in paths.items()}
    found.question = one.turns[-1].question
    found.message = user(*shown["one"], found.question)
    found.prompt = Prompt(found.question, pictures["one"])
    earlier = tuple((turn.question, turn.answer) for turn in turns.turns[:-1])
    talk: list[dict[str, Any]] = []
    for question, answer in earlier:
        talk += [user(question), {"role": "assistant", "content": answer}]
    talk = [user(*shown["turns"], earlier[0][0]), *talk[1:], user(turns.turns[-1].question)]
    asked = film.turns[-1].question
    found.cases = {
        "picture": ([found.message], found.prompt),
        "two pictures": (
            [user(*shown["two"], two.turns[-1].question)],
            Prompt(two.turns[-1].question, pictures["two"]),
        ),
        "turns": (talk, Prompt(turns.turns[-1].question, pictures["turns"], earlier=earlier)),
        "clip": (
            [user(clip(data_url(found.mp4)), asked)],
            Prompt(asked, clip=untrusted.clip(found.mp4, 16)),
        ),
    }
    return found
