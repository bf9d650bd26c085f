"""The switch ``variant``: every method as its authors' program does it, in every way a recipe can be given."""

from __future__ import annotations

import functools
import inspect

import pytest
import zoo

from mmaccel import MmaccelError, UnsupportedError, VidKV, accelerate_vlm, accelerated
from mmaccel.cli import main
from mmaccel.cli.methods import describe, official_doc
from mmaccel.method import Method, Policy, RebuildingMethod
from mmaccel.method.registry import methods
from mmaccel.recipe import get_recipe

OWN = {name: kind for name, kind in methods().items() if kind.__module__.startswith("mmaccel.")}


# --- methods ----------------------------------------------------------------------------------------------------------
def test_methods_with_a_variant_say_what_it_changes() -> None:
    source = functools.cache(inspect.getsource)
    for name, kind in OWN.items():
        bases = [one for one in kind.__mro__ if one.__module__.startswith("mmaccel.") and one is not Method]
        asks = any("self.official" in source(one) or "def by(" in source(one) for one in bases)
        counts = kind.official_count is not Method.official_count or kind.official_rounding != Method.official_rounding
        # of policies and rebuilding methods the runtime asks
        differs = asks or counts or issubclass(kind, (Policy, RebuildingMethod))
        assert bool(official_doc(kind)) == differs, name
        assert describe(name)["official"] == official_doc(kind).replace("``", ""), name


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


def test_an_instance_in_its_variant_is_taken_as_such() -> None:
    """What its repr says can be given; in a list the variant holds for all, so it is a keyword there."""
    codec = VidKV(page=64).by("official")
    assert get_recipe(codec).build()[0][1] == get_recipe("vidkv", page=64, variant="official").build()[0][1] == codec
    assert not get_recipe(codec, variant="exact").build()[0][1].official
    with pytest.raises(MmaccelError, match="give it as a keyword"):
        get_recipe(["divprune", codec])


# --- calls ------------------------------------------------------------------------------------------------------------
def test_one_call_in_another_variant() -> None:
    feed = zoo.inputs("llava")
    with accelerated(zoo.model("llava"), "fopru", retain=0.3) as model:
        kept = []
        for asked in (None, {"variant": "official"}):
            model(**feed, mmaccel=asked)
            kept.append(model.mmaccel.stats().visual_tokens_kept)
        assert kept == [11, 10]
    for name in ("prumerge", "vidkv"):
        with accelerated(zoo.model("llava"), name) as model, pytest.raises(UnsupportedError, match="for one call"):
            model(**feed, mmaccel={"variant": "official"})
    with pytest.raises(UnsupportedError, match="name it with clip="):
        accelerate_vlm(zoo.model("llava"), "cdpruner", variant="official")


# --- elsewhere -------------------------------------------------------------------------------------------------------
def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "hired"]) == 0
    assert "(variant='official') the i-th tile covers" in " ".join(capsys.readouterr().out.split())
