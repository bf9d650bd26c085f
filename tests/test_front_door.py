"""The front door: what a recipe may be given as, what the signatures say, and how everything reads."""

from __future__ import annotations

import inspect
import json
import logging
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import zoo
from laws.helpers import FAMILIES, SHORT, generate, inputs, model
from tail import few

import mmaccel
from mmaccel import (
    KIVI,
    DivPrune,
    FastV,
    Method,
    MmaccelError,
    Recipe,
    SnapKV,
    Stage,
    accelerate_encoder,
    accelerate_vlm,
    accelerated,
    accelerated_encoder,
    get_recipe,
    recipes,
)
from mmaccel.core.figures import CallStats, EncoderStats
from mmaccel.method import ProjectorMethod

ROOT = Path(__file__).parent.parent
ONE = Recipe("fastv", (Stage("fastv", 0.5, {"layer": 3}),))
SEVERAL = (Stage("divprune", 0.5), Stage("snapkv", 0.25, {"window": 16}), Stage("kivi", None, {"bits": 4}))


# --------------------------------------------------------------------------------------------------- what a recipe is


@pytest.mark.parametrize(
    "which",
    [
        "fastv",
        FastV,
        FastV(layer=3),
        Stage("fastv", 0.5, {"layer": 3}),
        ONE,
        {"name": "fastv", "stages": [{"method": "fastv", "retain": 0.1, "options": {"layer": 3}}]},
        json.loads(ONE.to_json()),
        [FastV(layer=3)],
        ("fastv",),
    ],
)
def test_one_method_given_in_every_way(which: Any) -> None:
    options = {} if "3" in str(which) or isinstance(which, Recipe) else {"layer": 3}
    assert get_recipe(which, retain=0.5, **options).stages == ONE.stages


@pytest.mark.parametrize(
    "which",
    [
        [DivPrune(), SnapKV(window=16), KIVI(bits=4)],
        ["divprune", SnapKV(window=16), Stage("kivi", None, {"bits": 4})],
        (DivPrune, Recipe("mine", SEVERAL[1:])),
        [{"name": "mine", "stages": [{"method": "divprune", "retain": 0.1}]}, SnapKV(window=16), KIVI(bits=4)],
        (part for part in (get_recipe("divprune"), get_recipe(["snapkv", "kivi"], window=16, bits=4))),
    ],
)
def test_several_methods_given_in_any_mixture(which: Any) -> None:
    assert get_recipe(which, retain=0.5).stages == SEVERAL


def test_a_file_and_a_path(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(ONE.to_json())
    assert get_recipe(tmp_path / "mine.json") == get_recipe(str(tmp_path / "mine.json")) == ONE
    assert get_recipe([tmp_path / "mine.json", "snapkv"]).name == "fastv+snapkv"


#: of methods that are shipped
SHIPPED = sorted(
    name for name, made in recipes().items() if all(type(m).__module__.startswith("mmaccel.") for _, m in made.build())
)


def test_what_methods_say_of_themselves_is_what_they_were_made_of() -> None:
    """Every stage of every recipe: given as an instance it is the same method, and its repr makes it again."""
    keys = ("name", "stages", "positions", "variant", "text_retain", "anchor")
    for name, made in recipes().items():
        if name not in SHIPPED:
            continue
        for stage in made.stages:
            method = stage.build()
            assert get_recipe(method).stages[0].build() == method
            assert eval(repr(method), vars(mmaccel) | {type(method).__name__: type(method)}) == method
        again = eval(repr(made), {"Recipe": Recipe, "Stage": Stage})
        assert [getattr(again, key) for key in keys] == [getattr(made, key) for key in keys]


def test_budgets_of_papers_keep_their_meaning_in_a_list() -> None:
    """`retain` of holitom is what its last stage leaves, and the stage before leaves twice as much."""
    made = get_recipe(["holitom", "snapkv"], retain=0.1)
    assert [stage.retain for stage in made.stages] == [0.2, 0.1, get_recipe("snapkv").retain]
    with pytest.raises(MmaccelError, match="Recipe 'mine' says variant='official', which holds for a whole recipe"):
        get_recipe([Recipe("mine", variant="official"), "snapkv"])


def test_none_is_what_the_recipe_says() -> None:
    for name in ("balanced", "none"):
        assert get_recipe(name, retain=None, positions=None, variant=None, text_retain=None) == recipes()[name]
    whole = Recipe("mine", (Stage("snapkv", 0.5),), variant="official", text_retain=0.5)
    assert get_recipe(whole, retain=0.2) == whole.override(retain=0.2)


@pytest.mark.parametrize(
    ("which", "match"),
    [
        (lambda: zoo.processor("llava"), "^A processor .*is not a recipe; give it as processor="),
        (lambda: model("llava").config, "^A LlavaConfig is not a recipe; give a name, a method such as"),
        (lambda: zoo.inputs("llava"), "holds what JSON has no word for"),
        (lambda: model("llava"), "^A LlavaForConditionalGeneration is not a recipe"),
        (lambda: None, "^None is not a recipe"),
        (lambda: ["divprune", 3], "^3 is not a recipe"),
        (lambda: type("Mine", (ProjectorMethod,), {}), "^Mine has no `name`; give the class a unique name"),
        (lambda: type("Mine", (Method,), {"name": "mine"}), "^Mine works at no site; derive it from a base class in"),
        (
            lambda: type("Mine", (ProjectorMethod,), {"name": "mine"}),
            "^Method 'mine': Can't instantiate abstract class",
        ),
        (lambda: [SnapKV(), DivPrune()], "order of the sites"),
    ],
)
def test_what_is_no_recipe(which: Any, match: str) -> None:
    with pytest.raises(MmaccelError, match=match) as caught:
        accelerate_vlm(model("llava"), which())
    assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------- signatures


def nearest(name: str) -> str:
    with pytest.raises(MmaccelError) as caught:
        get_recipe(name)
    assert str(caught.value).startswith(f"There is no recipe {name!r}")
    return str(caught.value).removeprefix(f"There is no recipe {name!r}")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        # a slip, and what does the same as what was meant
        ("prumerge+", "; did you mean 'prumerge-plus'? Nearest in what they do: 'prumerge', "),
        ("Streaming LLM", "; did you mean 'streaming-llm'? Nearest in what they do: 'streaming-llm-decode', "),
        ("snapkv2", "; did you mean 'snapkv' or 'capkv' or 'speckv'? Nearest in what they do: '"),
        ("llava-prumerge", "; did you mean 'prumerge' or 'prumerge-plus' or "),
        # papers that are not here
        ("TRIM", ". Not here: not built yet. Nearest in what they do: 'cdpruner', 'qg-vtc', 'visiontrim'."),
        ("Chunk-KV", "; did you mean 'chunkkv'? Nearest in what they do: '"),
        ("Long-VU", ". Not here: needs weights of its own. Nearest in what they do: 'free-video-llm', "),
        ("LongMamba", ". Not here: not built yet."),
        # one of several in a row, and a second name
        ("TrimR", ". Not here: end the reasoning of a text model early, "),
        ("medusa", ". Not here: needs weights of its own."),
        ("D2F", ". Not here: not for vision language models."),
        ("LLMA", ". It is lossless=True, lookup=True."),
        ("Lookahead Q-Cache", ". It is laq."),
        ("HybridKV", ". Not here: its program was not found"),
        # words
        ("attention-sinks", "; did you mean 'duoattention' or 'attention-received' or "),
        ("kv_quantization", "; nearest in what they do: 'fp8', "),
        ("merge-similar-tokens", "; nearest in what they do: 'tome', "),
        ("xyzzy", "; closest in spelling are '"),
    ],
)
def test_an_unknown_name_gets_names_like_it_and_names_of_what_does_the_same(name: str, end: str) -> None:
    said = nearest(name)
    assert said.startswith(end), said
    assert said.partition("what they do: ")[2].count(", ") <= 2
    assert said.startswith(".") or sum(known in said for known in map(repr, mmaccel.recipes())) <= 6
    with pytest.raises(MmaccelError, match="no method 'fastvv'; did you mean 'fastv' .* what they do: 'fastkv-tokens'"):
        mmaccel.get_method("fastvv")


def test_papers_that_are_not_here_are_not_here() -> None:
    """And what is said to be like them is."""
    file = ROOT / "mmaccel" / "method" / "systems.toml"
    listed = tomllib.loads(file.read_text(encoding="utf-8"))["system"]
    known = mmaccel.recipes()
    plain = {re.sub(r"[^a-z0-9]", "", name) for name in known}
    names = [re.sub(r"[^a-z0-9]", "", one["name"].lower()) for one in listed]
    assert len(listed) > 200 and len(set(names)) == len(names)
    for one in listed:
        for name in re.split(r"[,/()=]|\bas\b|\bgroup\b|[.]{3}", one["name"]):
            if name.strip() and re.sub(r"[^a-z0-9]", "", name.lower()) not in plain:
                assert nearest(name.strip()).startswith((". It is ", ". Not here: ")), name
    for name, one in zip(names, listed, strict=True):
        assert ("here" in one) != ("why" in one) and not ("why" in one and name in plain), one["name"]
        for recipe in re.findall(r"`([a-z0-9-]+)`", one.get("here", "")):
            assert recipe in known or not recipe.islower(), one["name"]
        if "near" in one:
            like = one["near"]
            assert len(like) == 3 == len(set(like)) and set(like) <= set(known), one["name"]
            assert "in what they do: " + ", ".join(map(repr, like)) in nearest(one["name"])


def test_what_matters_is_in_the_signatures() -> None:
    names = ["model", "recipe", "retain", "processor", "positions", "variant", "text_retain", "proportional", "chunk"]
    names += ["frames_at_once", "kernels", "offload", "lossless", "draft", "lookup", "fallback", "options"]
    assert list(inspect.signature(accelerate_vlm).parameters) == names
    assert list(inspect.signature(accelerated).parameters) == names
    for function in (accelerate_encoder, accelerated_encoder):
        assert list(inspect.signature(function).parameters) == ["model", "recipe", "retain", "kernels", "options"]
    for function in (accelerate_vlm, accelerated, accelerate_encoder, accelerated_encoder):
        assert all(
            parameter.annotation is not parameter.empty for parameter in inspect.signature(function).parameters.values()
        )


def test_arguments_reach_the_recipe() -> None:
    tiny = model("llava")
    with accelerated(tiny, FastV(), retain=3, variant="official", layer=2, kernels="off"):
        handle = tiny.mmaccel
        assert handle.recipe.stages == (Stage("fastv", 3, {"layer": 2}),)
        assert handle.recipe.variant == "official" and handle.kernels == "off"
    with accelerated(tiny, ["divprune", "snapkv"], positions="paper", text_retain=0.5):
        assert (tiny.mmaccel.recipe.positions, tiny.mmaccel.recipe.text_retain) == ("paper", 0.5)


# -------------------------------------------------------------------------------------------------------- how it reads


def test_reprs() -> None:
    made = get_recipe([DivPrune(), SnapKV(window=16)], retain=0.5)
    assert repr(made) == "Recipe('divprune+snapkv', (Stage('divprune', 0.5), Stage('snapkv', 0.25, {'window': 16})))"
    assert str(made) == "divprune+snapkv (divprune 50 %; snapkv 25 %, window=16)"
    assert str(get_recipe("divprune", retain=64)) == "divprune 64 a picture"
    assert str(get_recipe("none")) == "none (nothing is dropped)"
    assert repr(get_recipe("none", variant="official")) == "Recipe('none', variant='official')"
    assert repr(SnapKV()) == "SnapKV()" and repr(SnapKV(window=16)) == "SnapKV(window=16)"
    tiny = model("llava")
    with accelerated(tiny, made):
        assert repr(tiny.mmaccel) == "<mmaccel on llava: divprune+snapkv (divprune 50 %; snapkv 25 %, window=16)>"


def test_the_log_says_what_was_resolved(caplog: Any, capsys: Any, recwarn: Any) -> None:
    tiny = model("qwen3_vl")
    with caplog.at_level(logging.DEBUG, logger="mmaccel"), accelerated(tiny, ["fastv", "snapkv"], retain=0.5):
        generate(tiny, inputs("qwen3_vl"))
        tiny.mmaccel.stats()
    said = [record.getMessage() for record in caplog.records if record.name == "mmaccel"]
    said = [one for one in said if "answers of SmolLM2" not in one]
    assert {record.levelname for record in caplog.records if record.name == "mmaccel"} == {"INFO"}
    assert said == [
        "<mmaccel on qwen3_vl: fastv+snapkv (fastv 50 %; snapkv 25 %)>",
        "stage 0 at site layers: FastV(layer=3), budget 0.5",
        "stage 1 at site cache: SnapKV(), budget 0.25",
        "positions='keep', variant='exact', kernels='auto'",
        "fastv works at layer 3: layer 2, its default, is out of reach in this model",
    ]
    assert capsys.readouterr() == ("", "") and not [w for w in recwarn if "mmaccel" in str(w.filename)]


# ------------------------------------------------------------------------------------------------------------- figures

CALL: dict[str, Any] = {
    "recipe": "mine",
    "prompt_tokens": 2100,
    "visual_tokens": 2025,
    "visual_tokens_kept": 203,
    "visual_tokens_per_layer": 203.0,
    "stages": [{"site": "projector", "method": "divprune", "tokens_in": 2025, "resolved": None, "tokens_kept": 203}],
    "kv_bytes": round(6.7 * 2**20),
    "kv_bytes_bare": round(24.7 * 2**20),
    "labels_ignored": 0,
    "notes": ["<b> & co"],
    "decode_steps": 3,
    "captured_steps": 0,
    "drafting": {},
    "fallback": {},
    "offload": {},
    "uncaptured": "",
    "tokens_returned": 0,
    "retraced": 0,
    "sound_tokens": 0,
    "sound_tokens_kept": 0,
    "seconds": {"selection": 0.003, "prefill": 1.25, "packing": 0.0001},
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "2,025 -> 203 visual tokens (10 %), KV 24.7 -> 6.7 MiB, selection 3 ms"),
        ({"visual_tokens_kept": 4, "seconds": {}}, "2,025 -> 4 visual tokens (0.2 %), KV 24.7 -> 6.7 MiB"),
        ({"visual_tokens_kept": 2025, "seconds": {"packing": 1.26}}, "2,025 visual tokens, KV 24.7 -> 6.7 MiB, packing 1.3 s"),
        ({"kv_bytes_bare": 7 * 2**20, "kv_bytes": 7 * 2**20, "visual_tokens": 0}, "2,100 tokens, none of them visual, KV 7.0 MiB, selection 3 ms"),  # noqa: E501
        ({"kv_bytes_bare": 3 << 30, "kv_bytes": 1 << 29, "visual_tokens_kept": 2025}, "2,025 visual tokens, KV 3.0 -> 0.5 GiB, selection 3 ms"),  # noqa: E501
        ({"kv_bytes_bare": 0, "kv_bytes": 0}, "2,025 -> 203 visual tokens (10 %), selection 3 ms"),
    ],
)  # fmt: skip
def test_figures_in_one_line(changes: dict[str, Any], line: str) -> None:
    assert repr(CallStats({**CALL, **changes})) == line


def test_figures_of_drafts_are_counts_and_seconds_in_a_table() -> None:
    source = {"drafted": 1200, "accepted": 900, "seconds": 0.5, "prepare_seconds": 0.0}
    sums = {"tokens": 2000, "verifications": 1100, "row_verifications": 1200, "forwards_saved": 899}
    sums |= {"drafted": 1200, "accepted": 900}
    drafting = {**sums, "verify_seconds": 1.5, "sources": {"self": source}}
    shown = CallStats({**CALL, "drafting": drafting})
    assert "900 of 1,200 drafted tokens accepted, 1.75 tokens a verification, 899 forwards saved" in repr(shown)
    cell = (
        "tokens 2,000, verifications 1,100, row_verifications 1,200, forwards_saved 899, drafted 1,200, accepted 900, "
        "verify_seconds 1.5 s, sources (self (drafted 1,200, accepted 900, "
    )
    assert f"<td>{cell}seconds 500 ms, prepare_seconds &lt;1 ms))</td>" in shown._repr_html_()


def test_figures_read_as_a_dict_as_attributes_and_as_a_table() -> None:
    said = CallStats(CALL)
    assert said["kv_bytes"] == said.kv_bytes and "notes" in said and said == CALL and dict(said) == CALL
    assert json.loads(json.dumps(said)) == CALL
    assert set(CALL) == set(CallStats.__annotations__) and set(CALL) <= set(dir(said))
    plain = said.to_dict()
    assert type(plain) is dict and plain == CALL
    plain["stages"][0]["method"] = "other"
    assert said == CALL
    table = said._repr_html_()
    assert table.count("<tr>") == 17 and "&lt;b&gt; &amp; co" in table and "<b>" not in table
    assert "<caption>2,025 -&gt; 203 visual tokens (10 %)" in table and "method divprune" in table
    with pytest.raises(AttributeError, match="CallStats has no 'kept'$"):
        said.kept  # noqa: B018


def test_figures_before_the_first_call() -> None:
    said = CallStats()
    assert said == {} and not said and repr(said) == "no call yet" and "no call yet" in said._repr_html_()
    with pytest.raises(AttributeError, match="the model has not been called yet"):
        said.kv_bytes  # noqa: B018


def test_figures_of_an_encoder() -> None:
    said = EncoderStats(
        recipe="tome",
        site="encoder",
        method="tome",
        tokens_in=512,
        resolved=128,
        tokens_kept=128,
        seconds={"encoder": 0.02},
    )
    assert repr(said) == "512 -> 128 patches (25 %), encoder 20 ms" and set(said) == set(EncoderStats.__annotations__)


@pytest.mark.parametrize("family", few(FAMILIES, SHORT))
def test_the_cache_of_the_bare_model_is_computed_to_the_byte(family: str) -> None:
    tiny, feed = model(family), inputs(family, "uneven")
    for name in ("divprune", "snapkv", "kivi"):
        with accelerated(tiny, name, processor=zoo.processor(family)):
            generate(tiny, feed)
            reduced = tiny.mmaccel.stats()
            generate(tiny, feed, mmaccel=False)
            bare = tiny.mmaccel.stats()
        assert reduced.kv_bytes_bare == bare.kv_bytes_bare == bare.kv_bytes > 0
        assert set(reduced) == set(CallStats.__annotations__) and isinstance(reduced, CallStats)
