"""Methods of a user: given as they are, without a name in the registry, and their handle."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import zoo
from encoders.small import encoder, features, pixels
from laws.helpers import generate, inputs, model
from test_bad_input import one_sentence
from torch import Tensor, nn

import mmaccel
from mmaccel import MmaccelError, Recipe, SnapKV, accelerate_vlm, accelerated, accelerated_encoder, get_recipe, handle
from mmaccel.core.reduction import Reduction
from mmaccel.encoders.tome import ToMe
from mmaccel.method import Policy, ProjectorMethod, TokenBatch
from mmaccel.programs.identity import recipe_identity
from mmaccel.programs.tune import tuning


class First(ProjectorMethod):
    """Keep the first tokens from ``start`` on; ``net``, if given, sees the features."""

    name = "first"
    start: int = 0
    net: nn.Module | None = None

    def reduce(self, tokens: TokenBatch, count: Tensor) -> Reduction:
        if self.net is not None:
            self.net(tokens.features.float())
        slot = torch.arange(tokens.valid.shape[1])
        return Reduction.top(-((slot - self.start) % len(slot)).expand_as(tokens.valid), tokens.valid, count)


class FromStart(ProjectorMethod):
    """The same, with an ``__init__`` of its own and the name of a method that is shipped."""

    name = "fastv"

    def __init__(self, start: int) -> None:
        self.start = start

    reduce = First.reduce  # type: ignore[assignment]
    net = None


class Latest(Policy):
    """Keep the latest keys."""

    name = "latest"
    default_retain = 0.1

    def score(self, keys: Any) -> Tensor:
        """Scores ``[B, H, K]``."""
        scores: Tensor = keys.index[:, None].expand(keys.keys.shape[:3]).float()
        return scores


def kept(which: Any, **options: Any) -> list[int]:
    """The slots of the picture's tokens that a recipe keeps."""
    tiny = model("llava")
    with accelerated(tiny, which, retain=4, **options):
        generate(tiny, inputs("llava"))
        (segment,) = tiny.mmaccel.layout.segments
        return torch.as_tensor(tiny.mmaccel.reduction.kept[0, segment.places]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("which", "options", "slots"),
    [
        (First, {}, [0, 1, 2, 3]),
        (First(), {}, [0, 1, 2, 3]),
        (First(start=7), {}, [7, 8, 9, 10]),
        (First(start=7), {"start": 9}, [9, 10, 11, 12]),
        (FromStart(5), {}, [5, 6, 7, 8]),
        ([First(start=2)], {}, [2, 3, 4, 5]),
    ],
)
def test_a_method_that_nobody_registered(which: Any, options: dict[str, Any], slots: list[int]) -> None:
    before = dict(mmaccel.methods())
    assert kept(which, **options) == slots
    assert mmaccel.methods() == before, "it changes nothing for others"


def test_it_is_part_of_a_recipe() -> None:
    tiny = model("llava")
    with accelerated(tiny, [First(start=3), Latest()], retain=8):
        generate(tiny, inputs("llava"))
        stages = tiny.mmaccel.stats()["stages"]
        assert [(one["method"], one["tokens_kept"]) for one in stages] == [("first", 8), ("latest", 4)]
        assert str(tiny.mmaccel.recipe) == "first+latest (first 8 a picture, start=3; latest 10 %)"
        assert "projector: first, keeps 8 a picture, start=3" in tiny.mmaccel.recipe.describe()
        generate(tiny, inputs("llava"), mmaccel={"retain": 6})
        assert tiny.mmaccel.stats()["stages"][0]["tokens_kept"] == 6
        with accelerated(tiny, "divprune"):
            pass
        generate(tiny, inputs("llava"))
        assert tiny.mmaccel.stats()["stages"][0]["tokens_kept"] == 8, "again() puts on the same"
    assert copy.deepcopy(get_recipe(First(start=3))) == get_recipe(First(start=3)) != get_recipe(First(start=4))


def test_two_classes_of_one_name_stay_apart() -> None:
    """As in a notebook whose cell was run again while an older model still has the older class."""

    def made(start: int) -> type[ProjectorMethod]:
        def reduce(self: Any, tokens: TokenBatch, count: Tensor) -> Reduction:
            slot = torch.arange(tokens.valid.shape[1])
            return Reduction.top(-((slot - start) % len(slot)).expand_as(tokens.valid), tokens.valid, count)

        return type("Mine", (ProjectorMethod,), {"name": "mine", "reduce": reduce, "__module__": __name__})

    one, other = made(0), made(5)
    first, second = get_recipe(one, retain=4), get_recipe(other, retain=4)
    assert first != second and recipe_identity(first) != recipe_identity(second)
    assert (kept(first), kept(second), kept(first)) == ([0, 1, 2, 3], [5, 6, 7, 8], [0, 1, 2, 3])


def test_a_module_as_an_option_arrives_as_it_is() -> None:
    net, tiny = nn.Linear(64, 1), model("llava")
    seen = []
    net.register_forward_hook(lambda *given: seen.append(given[0]))
    with accelerated(tiny, First(net=net)):
        generate(tiny, inputs("llava"))
        assert tiny.mmaccel.plan.stages[0].method.net is net
    assert seen and all(one is net for one in seen)


def test_in_an_encoder() -> None:
    class Halves(ToMe):
        """As ToMe, under a name of its own."""

        name = "halves"

    tower = encoder("clip")
    with accelerated_encoder(tower, Halves(), retain=0.5):
        features(tower, pixels())
        assert tower.mmaccel.stats().method == "halves"


def test_what_a_method_without_a_name_cannot_do() -> None:
    for which in (First(start=3), FromStart(3)):
        with pytest.raises(MmaccelError, match="method of your own that is not known by this name, so JSON") as caught:
            get_recipe(which).to_json()
        one_sentence(str(caught.value))
    with pytest.raises(MmaccelError, match="Method 'first' has no option 'begin'|'begin' is not an option"):
        get_recipe(First, begin=3)
    with pytest.raises(MmaccelError, match="start='x' is of the wrong type; give int"):
        get_recipe(First, start="x").build()
    # a search that could not write its result does not begin
    with pytest.raises(MmaccelError, match="not known by this name, so JSON"):
        tuning.tune(model("llava"), zoo.processor("llava"), [], recipes=[First()])


def test_an_init_of_a_base_stays() -> None:
    class Sub(FromStart):
        name = "sub"

    assert kept(Sub(6)) == [6, 7, 8, 9]
    assert not dataclasses.is_dataclass(Sub)


# ------------------------------------------------------------------------------------------------------------- registry


def registered(name: str, module: str) -> Any:
    kind = type("Mine", (First,), {"name": name, "__module__": module})
    return mmaccel.register(kind)


def test_no_name_is_taken_twice(fresh_registry: None) -> None:
    """Not by a class of the same name from elsewhere, neither of a method that is shipped nor of a recipe."""
    mine = registered("mine", "one")
    assert mmaccel.get_method("mine") is mine
    again = registered("mine", "one")
    assert mmaccel.get_method("mine") is again is not mine, "a cell of a notebook is run again"
    with pytest.raises(MmaccelError, match=r"The name 'mine' is taken by one\.Mine; choose another"):
        registered("mine", "other")
    with pytest.raises(MmaccelError, match=r"The name 'fastv' is taken by mmaccel\.layers\.fastv\.FastV"):
        mmaccel.register(type("FastV", (First,), {"name": "fastv", "__module__": "mine"}))
    registered("dycoke", "one")
    with pytest.raises(MmaccelError, match=r"The method one\.Mine has the name of the recipe 'dycoke'; choose another"):
        mmaccel.recipes()


# --------------------------------------------------------------------------------------------------------------- handle


def test_a_handle_is_had_of_a_model() -> None:
    tiny = model("llava")
    accelerate_vlm(tiny, SnapKV())
    assert handle(tiny) is tiny.mmaccel and handle(tiny).recipe == get_recipe("snapkv")
    handle(tiny).remove()
    assert not hasattr(tiny, "mmaccel")


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (lambda: model("llava"), "^This LlavaForConditionalGeneration is not accelerated; call mmaccel.accelerate_vlm"),
        (lambda: "llava", "^The name 'llava' is not a model"),
        (lambda: zoo.processor("llava"), "^A LlavaProcessor is not a model"),
        (lambda: None, "^A NoneType is not a model"),
    ],
)
def test_what_has_no_handle(which: Any, words: str) -> None:
    with pytest.raises(MmaccelError, match=words) as caught:
        handle(which())
    one_sentence(str(caught.value))


def test_an_encoder_has_another_handle() -> None:
    tower = encoder("clip")
    with (
        accelerated_encoder(tower, "tome"),
        pytest.raises(MmaccelError, match=r"accelerated encoder; get its handle by EncoderAccelerator\.on"),
    ):
        handle(tower)


def test_recipes_of_shipped_methods_stay_data() -> None:
    """An instance of a registered class is its name and its options."""
    assert get_recipe(SnapKV(window=16)) == Recipe(
        "snapkv", get_recipe("snapkv", window=16).stages, summary=SnapKV.summary, paper=SnapKV.paper
    )
