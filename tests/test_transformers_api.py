"""The one module that spells what releases of transformers rename, and what users see of a release nobody has tried."""

from __future__ import annotations

import ast
import inspect
import json
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import zoo
from laws.helpers import generate, inputs
from transformers import DynamicCache, cache_utils, masking_utils

import mmaccel
from mmaccel import UnsupportedError, accelerate_vlm, accelerated
from mmaccel.cli import main
from mmaccel.core import transformers_api
from mmaccel.families import family_of

SOURCES = [
    path
    for top in ("mmaccel", "demo/mmaccel_demo")
    for path in Path(__file__).parents[1].joinpath(top).rglob("*.py")
    if path.name != "transformers_api.py"
]
#: modules of transformers whose names are imported through the seam
INTERNAL = ("transformers.cache_utils", "transformers.masking_utils", "transformers.modeling_utils")


def spelt(tree: ast.AST) -> Iterator[str]:
    """Keywords, attributes and texts of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_nothing_else_spells_what_releases_rename() -> None:
    assert len(SOURCES) > 100
    needed = transformers_api._NEEDED["transformers"]
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
        found = {"past_key_values", "cache_params"} & set(spelt(tree))
        found |= {node.module for node in imported if node.module in INTERNAL}
        names = (a.name for node in imported if node.module == "transformers" for a in node.names)
        assert not found.union(name for name in names if name in needed), path


def test_names_of_the_cache_are_those_that_models_take() -> None:
    own = transformers_api.cache_names()[0]
    for family in ("llava", "qwen2_5_vl", "qwen3_5"):
        text = family_of(zoo.model(family)).text
        assert own in inspect.signature(type(text).forward).parameters, f"{type(text).__name__} takes no {own}="


@pytest.mark.parametrize("recipe", ["divprune", "fastv", "snapkv", "h2o-decode"])  # by choice: one of a site
# "cache_params" is a name of layers alone
@pytest.mark.parametrize("name", [name for name in transformers_api.cache_names() if name != "cache_params"])
def test_a_cache_is_found_by_every_name_that_a_caller_may_use(name: str, recipe: str) -> None:
    """Hooks see a caller's arguments before transformers renames the old ones."""
    model, feed = zoo.model("llava", seed=3), inputs("llava")
    with accelerated(model, recipe, retain=0.3), warnings.catch_warnings():
        # transformers warns of the old name
        warnings.simplefilter("ignore")
        expected = generate(model, feed).sequences
        cache = DynamicCache()
        assert generate(model, feed, **{name: cache}).sequences.equal(expected)
        assert cache.mmaccel.seen == expected.shape[1] - 1
        one = {"input_ids": expected[:, -1:]}
        for call in (model, model.generate):
            with pytest.raises(UnsupportedError, match="the bare model would misread"):
                call(**one, **{name: cache}, mmaccel=False)


def test_calls_do_not_warn_of_old_names() -> None:
    model, feed = zoo.model("llava", seed=3), inputs("llava")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        with accelerated(model, "snapkv", retain=0.3):
            model(**feed)
            out = generate(model, feed, **transformers_api.cache_argument(DynamicCache()))
            assert transformers_api.cache_of(out).mmaccel.seen == out.sequences.shape[1] - 1


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What was found out about the installed transformers is forgotten before and after."""
    monkeypatch.setattr(transformers_api, "_names", ())
    transformers_api.check.cache_clear()
    yield monkeypatch
    transformers_api.check.cache_clear()


def _renames_the_cache(patch: pytest.MonkeyPatch) -> str:
    def create_causal_mask(config: Any, inputs_embeds: Any, attention_mask: Any, memory: Any) -> None: ...

    patch.setattr(masking_utils, "create_causal_mask", create_causal_mask)
    return r"create_causal_mask\(cache or past_key_values or cache_params=\)"


def _drops_a_class(patch: pytest.MonkeyPatch) -> str:
    patch.delattr(cache_utils, "LinearAttentionLayer")
    return "transformers.cache_utils.LinearAttentionLayer"


def _drops_a_method(patch: pytest.MonkeyPatch) -> str:
    patch.delattr(cache_utils.CacheLayerMixin, "get_mask_sizes", raising=False)
    patch.delattr(cache_utils.DynamicLayer, "get_mask_sizes", raising=False)
    return "transformers.cache_utils.DynamicLayer.get_mask_sizes"


@pytest.mark.parametrize("change", [_renames_the_cache, _drops_a_class, _drops_a_method])
def test_what_a_release_lacks_is_said_in_one_sentence(change: Any, afresh: pytest.MonkeyPatch, capsys: Any) -> None:
    model = zoo.model("llava", seed=3)
    lacking = change(afresh)
    with pytest.raises(
        UnsupportedError, match=rf"transformers \S+ has no .*{lacking}.*, which mmaccel needs; run: pip"
    ):
        accelerate_vlm(model, "divprune")
    assert not hasattr(model, "mmaccel")
    assert main(["doctor"]) == 1
    assert "which mmaccel needs; run: pip install" in capsys.readouterr().out


def test_a_newer_release_works_and_doctor_says_that_it_was_not_tested(afresh: pytest.MonkeyPatch, capsys: Any) -> None:
    real = metadata.version
    afresh.setattr(metadata, "version", lambda name: "5.91.0.dev0" if name == "transformers" else real(name))
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [] and ["5.91.0.dev0 is newer than" in note for note in report["notes"]] == [True]
    model, feed = zoo.model("llava", seed=3), inputs("llava")
    with accelerated(model, "divprune", retain=0.3):
        assert generate(model, feed).sequences.shape[1] == feed["input_ids"].shape[1] + 4


def test_an_older_release_is_a_problem(afresh: pytest.MonkeyPatch, capsys: Any) -> None:
    real = metadata.version
    afresh.setattr(metadata, "version", lambda name: "5.9.1" if name == "transformers" else real(name))
    assert main(["doctor"]) == 1
    newest = ".".join(map(str, (5, transformers_api.TESTED[1][1] + 1)))
    assert f'older than 5.17, the oldest that mmaccel supports; run: pip install "transformers>=5.17,<{newest}"' in (
        capsys.readouterr().out
    )


def test_the_package_has_no_upper_bound_that_downgrades_a_user() -> None:
    (needed,) = [line for line in metadata.requires("mmaccel") or () if line.startswith("transformers")]
    oldest = ".".join(map(str, transformers_api.TESTED[0]))
    assert needed.replace(" ", "") == f"transformers>={oldest}"
    assert mmaccel.__version__
