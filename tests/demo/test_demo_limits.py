"""What visitors may send, and the one sentence that refuses the rest."""

from __future__ import annotations

import dataclasses
import json

import pytest
from mmaccel_demo import limits
from PIL import Image

from mmaccel import MmaccelError, Stage, methods, recipes
from mmaccel.media import untrusted
from mmaccel.programs import allowed_hosts


def refused(match, call, *args):
    with pytest.raises(MmaccelError, match=match) as caught:
        call(*args)
    sentence = str(caught.value)
    assert "\n" not in sentence and "/" not in sentence.replace("28 / 28", ""), "no path of ours"


@pytest.mark.parametrize("text", ["", "  \n ", None])
def test_an_empty_question(text):
    refused("question is empty", limits.question, text)


def test_a_question_is_trimmed_and_bounded():
    assert limits.question("  what? ") == "what?"
    refused("1001 characters", limits.question, "x" * 1001)


def test_pictures(files, tmp_path):
    assert limits.picture(str(files.png)).size == (224, 224)
    refused("no picture; upload", limits.picture, None)
    refused("of another format than PNG, JPEG, WEBP, GIF, BMP, or broken", limits.picture, str(files.text))
    refused("cannot be read: .*truncated", limits.picture, str(files.broken_png))
    refused("far too many pixels", limits.picture, str(files.huge))
    # below the limit of the decoder, above ours; and right at ours
    Image.new("1", (8000, 5001)).save(tmp_path / "over.png")
    refused("40 megapixels", limits.picture, str(tmp_path / "over.png"))
    Image.new("1", (8000, 5000)).save(tmp_path / "most.png")
    assert limits.picture(str(tmp_path / "most.png")).size == (1536, 960)
    # a kind that Pillow knows and we do not take
    Image.new("L", (8, 8)).save(tmp_path / "old.pcx")
    refused("of another format than", limits.picture, str(tmp_path / "old.pcx"))


def test_heavy_files(files, monkeypatch):
    monkeypatch.setattr(untrusted, "UPLOAD", 1 << 10)
    refused("at most 0 are taken", limits.picture, str(files.png))


def test_clips(files, monkeypatch):
    pytest.importorskip("av")
    found = limits.clip(str(files.mp4), 4)
    assert found.frames.shape == (4, 112, 112, 3)
    monkeypatch.setattr(limits, "FRAME_SIDE", 56)
    assert limits.clip(str(files.mp4), 4).frames.shape == (4, 56, 56, 3)
    refused("no clip; upload", limits.clip, "", 4)
    refused("is not a readable clip", limits.clip, str(files.png), 4)
    refused("cannot be decoded; upload another", limits.clip, str(files.broken_mp4), 4)


def test_recipes():
    assert limits.recipe("divprune", 0.5).retain == 0.5
    assert limits.recipe("kivi", 0.5).retain is None, "a codec drops nothing, so there is not a budget to set"
    text = limits.recipe("holitom").to_json()
    assert limits.recipe(text) == limits.recipe("holitom")
    refused("no recipe 'divprun'", limits.recipe, "divprun")
    refused("not valid JSON", limits.recipe, "{")
    refused("has no option 'speed'", limits.recipe, _stage("divprune", {"speed": 9}))
    refused("at most 20000", limits.recipe, "{" + "x" * 20_000)
    refused("share of the visual tokens", limits.recipe, "divprune", 1.5)


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "null", "3", "{}", "{]", "{'name': 1}", '{"name": 5}', '{"name": "x", "stages": [1]}', '{"a":' * 3000),
        *(
            '{"name": "x", "stages": [{"method": "divprune", "retain": RETAIN}]}'.replace("RETAIN", x)
            for x in ("NaN", '"a"', "[]", "9" * 5000)
        ),
    ],
)
def test_nonsense_pasted_as_a_recipe(text):
    refused(".", limits.recipe, text)


@pytest.mark.parametrize("half", ["\ud800", "\udc00", "\\ud83d", "\\uDE00", "\\ude00\\ud83d", "\\ud83d\\ud83d\\ude00"])
def test_halves_of_characters(half):
    """Text that no answer could carry to the page: the request would fail without a sentence."""
    refused("^The recipe has half of a surrogate pair", limits.recipe, _stage("divprune", {}).replace("mine", half))
    refused("^The question has half of a surrogate pair", limits.question, half)
    for whole in ("\\ud83d\\ude00", "\U0001f600"):
        assert limits.recipe(_stage("divprune", {}).replace("mine", whole)).name == "\U0001f600"


@pytest.mark.parametrize("retain", [0, -1, 1.5, True, "0.5", float("nan"), float("inf"), [0.5]])
def test_shares_that_are_none(retain):
    refused(
        "^The share of the visual tokens must be greater than 0 and at most 1, got ", limits.recipe, "divprune", retain
    )


@pytest.mark.parametrize("name", ["../../recipe.json", "/etc/passwd", "~/x.json", "recipe.json"])
def test_recipes_are_not_read_from_files(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.json").write_text(limits.recipe("divprune").to_json())
    with pytest.raises(MmaccelError, match="There is no recipe"):
        limits.recipe(name)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("cdpruner", "clip"),
        ("scenetilling", "clip_model"),
        ("learned", "selector"),
        ("specpc", "draft"),
        ("duoattention", "calibration"),
    ],
)
def test_recipes_name_no_models(method, option):
    refused("visitors cannot", limits.recipe, _stage(method, {option: "models"}))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("aim-pagerank", {"iterations": 30_000}),
        ("centerclip", {"iterations": 30_000}),
        ("expected-attention", {"future": 10**7}),
        ("random", {"seed": -(10**9)}),
        ("fastvid", {"segments": 10**15}),
        ("holitom-merge", {"tau": float("nan")}),
        ("snapkv", {"growth": float("inf")}),
        ("snapkv", {"layer_budget": "pyramid:1e5"}),
        ("vtc-cls", {"layers": [10**6]}),
        ("vtc-cls", {"layers": [1] * 17}),
        ("kivi", {"residual": 10**6}),
    ],
)
def test_options_that_ask_for_too_much(method, options):
    (name,) = options
    too_much = f"{method}: {name}=.*; at most .* (is|are) taken.|`{name}` of {method} must be .*, got {options[name]}."
    refused(f"^({too_much})$", limits.recipe, _stage(method, options))


def test_recipes_that_ask_for_too_much():
    refused("retain=1e\\+09 is too much", limits.recipe, json.dumps({"name": "n", "stages": [_plain(retain=10**9)]}))
    refused("17 stages; at most 16", limits.recipe, json.dumps({"name": "n", "stages": [_plain()] * 17}))


def _plain(**values):
    return {"method": "divprune", "retain": 0.5, "options": {}, **values}


def test_what_may_be_asked_for():
    """Every number of every method at its default and at four times that, and counts of keys of a long context."""
    for name, one in recipes().items():
        assert limits.recipe(name) == one and limits.recipe(one.to_json()) == one
    for cls in methods().values():
        for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
            if isinstance(field.default, (int, float)) and not isinstance(field.default, bool):
                limits._bound(Stage(cls.name, 0.5, {field.name: 4 * field.default}))
    limits.recipe(_stage("snapkv", {"cap": 16_384, "sinks": 64, "recent": 1024, "every": 128}))
    limits.recipe(_stage("random", {"seed": 1000}))


@pytest.mark.parametrize(
    ("header", "taken"),
    [
        *(
            (name, True)
            for name in ("localhost", "localhost:7860", "LOCALHOST:1", "127.0.0.1:7860", "10.0.0.7", "[::1]:7860")
        ),
        *((name, True) for name in ("demo.example.com", "a.hf.space:443", "Box:80")),
        *(
            (name, False)
            for name in ("evil.com", "evil.com:7860", "localhost.evil.com", "127.0.0.1.evil.com", "hf.space")
        ),
        *((name, False) for name in (None, "", ":7860", "evil.com@localhost.evil.com", "[", "a.hf.space.evil.com")),
    ],
)
def test_names_of_this_machine(header, taken):
    assert allowed_hosts.is_allowed(header, ("demo.example.com", "*.hf.space", "box")) is taken


def test_room_for_uploads(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "KEPT", 1000)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 600)
    assert limits.room(tmp_path, 400) and not limits.room(tmp_path, 401)
    (tmp_path / "a" / "two").write_bytes(b"x" * 400)
    assert limits.room(tmp_path, 0) and not limits.room(tmp_path, 1)


def test_options_that_name_files_or_models():
    """A new option of text must be looked at, and refused if it names something of this machine."""
    known = {
        "budget_in",
        "calibration",
        "clip",
        "clip_model",
        "query",
        "text_policy",
        "compact",
        "dialogue",
        "draft",
        "eviction_error",
        "head_budget",
        "layer_budget",
        "local",
        "marks",
        "proxy",
        "theme",
        "protect",
        "reduce",
        "rest",
        "selector",
    }
    found = {
        field.name
        for one in methods().values()
        if dataclasses.is_dataclass(one) and one.__module__.startswith("mmaccel.")
        for field in dataclasses.fields(one)
        if "str" in str(field.type)
    }
    assert found == known
    assert set(limits._NAMES) <= found


def _stage(method, options):
    return json.dumps({"name": "mine", "stages": [{"method": method, "retain": 0.5, "options": options}]})


@pytest.mark.parametrize("value", [0, 33, 2.5, None, "8", True, float("nan"), float("inf")])
def test_numbers_out_of_bounds(value):
    refused("whole number from 1 to 32", limits.number, value, 1, 32, "frames")


def test_numbers():
    assert limits.number(8.0, 1, 32, "frames") == 8
