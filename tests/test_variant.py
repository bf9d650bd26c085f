"""The switch ``variant``: every method as its authors' program does it, in every way a recipe can be given."""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from collections.abc import Callable

import pytest
import zoo

import mmaccel
from mmaccel import MmaccelError, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.cli import main
from mmaccel.cli.methods import describe, official_doc
from mmaccel.method import Method, Policy
from mmaccel.method.registry import methods
from mmaccel.recipe import Recipe, Stage, get_recipe

OWN = {name: kind for name, kind in methods().items() if kind.__module__.startswith("mmaccel.")}
GONE = [(name, option) for name, kind in OWN.items() for option in kind.gone]


# --- methods ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OWN)
def test_methods_with_a_variant_say_what_it_changes(name: str) -> None:
    kind = OWN[name]
    sources = [
        inspect.getsource(one) for one in kind.__mro__ if one.__module__.startswith("mmaccel.") and one is not Method
    ]
    asks = any("self.official" in source or "def by(" in source for source in sources)
    differs = asks or kind.official_count is not Method.official_count or issubclass(kind, Policy)
    assert bool(official_doc(kind)) == differs
    assert describe(name)["official"] == official_doc(kind).replace("``", "")


def test_a_recipe_puts_all_its_methods_in_its_variant() -> None:
    made = get_recipe(["dycoke-ttm", "elastic-cache", "vidkv"], variant="official")
    assert all(method.official for _, method in made.build())
    assert not any(method.official for _, method in made.override(variant="exact").build())
    codec = made.build()[2][1]
    assert codec.options() == {"page": 64, "fourier": True}
    assert repr(codec) == "VidKV(page=64, fourier=True).by('official')"
    # what a user gives stays
    assert get_recipe("vidkv", variant="official", page=640).build()[0][1].options()["page"] == 640


def test_fitting_to_a_model_keeps_the_variant() -> None:
    with accelerated(zoo.model("llava"), ["hired", "fastv", "mustdrop-filter"], variant="official") as model:
        assert [stage.method.official for stage in model.mmaccel.plan.stages] == [True] * 3


@pytest.mark.parametrize(("name", "option"), GONE)
def test_options_that_only_named_the_variant_say_what_to_do(name: str, option: str) -> None:
    for refused in (
        lambda: Stage(name, None, {option: True}).build(),
        lambda: get_recipe(name, **({} if option == "variant" else {option: True})).override(**{option: True}),
    ):
        with pytest.raises(
            MmaccelError, match="any more: .*(variant=|matching)" if option != "variant" else "variant|matching"
        ):
            refused()


# --- calls ------------------------------------------------------------------------------------------------------------
def test_one_call_in_another_variant() -> None:
    feed = zoo.inputs("llava")
    with accelerated(zoo.model("llava"), "fopru", retain=0.3) as model:
        kept = []
        for asked in (None, {"variant": "official"}):
            model(**feed, mmaccel=asked)
            kept.append(model.mmaccel.stats().visual_tokens_kept)
        assert kept == [11, 10]
        with pytest.warns(FutureWarning, match="variant="):
            model(**feed, mmaccel={"rounding": "official"})
        assert model.mmaccel.stats().visual_tokens_kept == 10
    for name in ("prumerge", "vidkv"):
        with accelerated(zoo.model("llava"), name) as model, pytest.raises(UnsupportedError, match="for one call"):
            model(**feed, mmaccel={"variant": "official"})
    with pytest.raises(UnsupportedError, match="name it with clip="):
        accelerate_vlm(zoo.model("llava"), "cdpruner", variant="official")


# --- the old name -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make",
    [
        lambda: get_recipe("divprune", rounding="official"),
        lambda: get_recipe(
            {"name": "divprune", "stages": [{"method": "divprune", "retain": 0.25}], "rounding": "official"}
        ),
        lambda: Recipe.from_json(json.dumps({"name": "x", "rounding": "official"})),
        lambda: Recipe("x", rounding="official"),  # type: ignore[call-arg]
        lambda: get_recipe("divprune").override(rounding="official"),
        lambda: accelerate_vlm(zoo.model("llava"), "divprune", rounding="official").mmaccel.recipe,
    ],
)
def test_the_old_name_works_and_warns(make: Callable[[], Recipe]) -> None:
    try:
        with pytest.warns(FutureWarning, match="rounding= is called variant= now"):
            made = make()
        assert made.variant == "official" and "rounding" not in made.to_json()
        with pytest.warns(FutureWarning, match="variant="):
            assert made.rounding == "official"
    finally:
        if mmaccel.is_accelerated(zoo.model("llava")):
            zoo.model("llava").mmaccel.remove()


def test_the_old_name_beside_the_new_one_is_refused() -> None:
    with pytest.warns(FutureWarning), pytest.raises(MmaccelError, match="give variant= alone"):
        get_recipe("divprune").override(rounding="official", variant="official")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = dataclasses.replace(get_recipe("divprune", variant="official"), name="mine")
    assert made.variant == "official"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "hired"]) == 0
    assert "(variant='official') the i-th tile covers" in " ".join(capsys.readouterr().out.split())
