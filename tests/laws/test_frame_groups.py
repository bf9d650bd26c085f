"""Law: a vision tower over pictures and frames in groups gives what it gives over all at once, under every recipe."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import oracle
import pytest
import zoo
from laws.helpers import FAMILIES, generate, logits
from torch import Tensor

from mmaccel import MmaccelError, Recipe, Stage, UnsupportedError, accelerate_vlm, accelerated
from mmaccel.families import family_of
from mmaccel.integrations.vllm.settings import settings_of
from mmaccel.method import LayerMethod, Policy, ProjectorMethod
from mmaccel.method.registry import methods
from mmaccel.runtime.call import mlp_pieces
from mmaccel.runtime.tower import frame_groups

pytestmark = pytest.mark.usefixtures("no_gradients")

KINDS = ("image", "images", "video", "mixed", "uneven", "textrow")
SEVERAL = [(family, kind) for family in FAMILIES for kind in zoo.kinds(family) if kind in KINDS]


@contextmanager
def watched(tiny: Any) -> Iterator[list[int]]:
    """How large the largest tensor is that each run of a tower gets."""
    seen: list[int] = []
    towers = family_of(tiny).towers()
    for tower in towers:
        bare = tower.forward

        def forward(*args: Any, bare: Any = bare, **kwargs: Any) -> Any:
            seen.append(max(x.numel() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)))
            return bare(*args, **kwargs)

        forward.__signature__ = inspect.signature(bare)  # type: ignore[attr-defined]
        vars(tower)["forward"] = forward
    try:
        yield seen
    finally:
        for tower in towers:
            del vars(tower)["forward"]


@pytest.mark.square(("family", "kind"), SEVERAL)
@pytest.mark.square("at_once", (1, 2, 10**6))
def test_groups_give_what_all_at_once_gives(family: str, kind: str, at_once: int) -> None:
    tiny, feed = oracle.subject(family), zoo.inputs(family, kind)
    with watched(tiny) as runs:
        with accelerated(tiny, "none", processor=zoo.processor(family)):
            wanted = logits(generate(tiny, feed))
        before, runs[:] = list(runs), []
        with accelerated(tiny, "none", processor=zoo.processor(family), frames_at_once=at_once):
            got = logits(generate(tiny, feed))
            notes = tiny.mmaccel.stats()["notes"]
    oracle.close(got, wanted, 2 * oracle.TOLERANCE)
    several = [note for note in notes if "groups" in note]
    assert bool(several) == (len(runs) > len(before)) and max(runs) <= max(before)
    if at_once == 1 and kind in ("images", "video"):
        assert several and max(runs) < max(before)
    if at_once == 10**6:
        assert not several


INSIDE = tuple(name for name, method in methods().items() if method.site in ("patches", "encoder"))
METHODS = (*INSIDE, *oracle.named(ProjectorMethod, LayerMethod, Policy))


@pytest.mark.square(
    ("family", "method", "kind"),
    oracle.in_turn(
        [(family, name) for family in FAMILIES for name in METHODS if oracle.fits(name, family)],
        lambda family: [kind for kind in zoo.kinds(family) if kind in ("images", "video", "uneven")],
    ),
    of="pairs",
)
def test_methods_choose_as_when_all_are_encoded_at_once(family: str, method: str, kind: str) -> None:
    """Of what methods see of the tower nothing is missing or out of order; those that work inside it have it run whole."""
    tiny, feed = oracle.subject(family), zoo.inputs(family, kind)
    with accelerated(tiny, oracle.recipe(method, family, 0.4), processor=zoo.processor(family)), watched(tiny) as runs:
        wanted = logits(generate(tiny, feed))
        kept, before, runs[:] = tiny.mmaccel.reduction.kept, list(runs), []
        got = logits(generate(tiny, feed, mmaccel={"frames_at_once": 1}))
        again, notes = tiny.mmaccel.reduction.kept, tiny.mmaccel.stats()["notes"]
    assert (again == kept).all()
    oracle.close(got, wanted, 2 * oracle.TOLERANCE)
    if method in INSIDE:
        assert runs == before
        assert len(before) > 1 or any(f"frames_at_once: {method} works inside the vision tower" in x for x in notes)


# --------------------------------------------------------------------------------------------- where memory is short


@contextmanager
def short_of(monkeypatch: pytest.MonkeyPatch, limit: int) -> Iterator[None]:
    """A machine on which so many bytes of activations fit."""
    with monkeypatch.context() as patch:
        for module in (frame_groups, mlp_pieces):
            patch.setattr(module, "SMALL", 0)
            patch.setattr(module, "activation_limit", lambda device: limit)
        yield


@pytest.mark.square("family", FAMILIES, of="kinds")
@pytest.mark.square("kind", ("image", "uneven"))
@pytest.mark.square("chunk", (None, 9))
def test_a_model_that_does_not_fit_computes_in_pieces(
    family: str, kind: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLPs of the language model and of the tower see no more tokens than fit, the answer is the same, decode steps run as
    ever, and nothing is left behind."""
    tiny, feed = oracle.subject(family), zoo.inputs(family, kind)
    adapter, seen = family_of(tiny), list[int]()
    inner = mlp_pieces.MlpPieces(
        list(adapter.text.layers), getattr(adapter.text.config, "num_experts_per_tok", None) or 1
    )
    assert len(inner.mlps) == len(adapter.text.layers) and inner.width
    with accelerated(tiny, "none", processor=zoo.processor(family), chunk=chunk):
        wanted = logits(generate(tiny, feed))

        def note(module: Any, args: Any, kwargs: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            seen.append(x.shape[:-1].numel())

        # what an MLP multiplies, which is what its pieces are
        parts = [next(x for x in mlp.modules() if not list(x.children())) for mlp in inner.mlps]
        bare = [vars(mlp).copy() for mlp in inner.mlps]
        hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
        limit = 5 * inner.width * 3 * 4
        with short_of(monkeypatch, limit):
            got = logits(generate(tiny, feed))
        for hook in hooks:
            hook.remove()
        assert [vars(mlp).keys() for mlp in inner.mlps] == [before.keys() for before in bare]
    oracle.close(got, wanted, 2 * oracle.TOLERANCE)
    assert seen and max(seen) <= 5 and len(seen) > len(parts) * 4


def test_a_forward_that_fails_leaves_the_mlps_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, feed = oracle.subject("llava"), zoo.inputs("llava", "image")
    mlps = [layer.mlp for layer in family_of(tiny).text.layers]

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    with accelerated(tiny, "none"), short_of(monkeypatch, 4096):
        hook = mlps[-1].down_proj.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(tiny, feed)
        hook.remove()
    assert not any("forward" in vars(mlp) for mlp in mlps)


def test_a_tower_that_does_not_fit_runs_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many frames at a time as fit, pictures by their size; without an option, and not where all fit."""
    for family in ("llava_onevision", "qwen2_5_vl", "pixtral"):
        tiny, feed = oracle.subject(family), zoo.inputs(family, "images")
        with watched(tiny) as runs, accelerated(tiny, "none", processor=zoo.processor(family)):
            wanted = logits(generate(tiny, feed))
            (whole,), runs[:] = list(runs), []
            with short_of(monkeypatch, whole * 4 * 40 * 2 // 3):
                got = logits(generate(tiny, feed))
            assert len(runs) == 2 and sum(runs) == whole
            assert "the vision tower encoded 2 pictures or frames in 2 groups" in tiny.mmaccel.stats()["notes"]
            runs[:] = []
            with short_of(monkeypatch, whole * 4 * 40):
                generate(tiny, feed)
            assert runs == [whole]
        oracle.close(got, wanted, 2 * oracle.TOLERANCE)


# --------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("value", (0, -1, 2.5, "8", True, float("nan"), [8]))
def test_groups_that_are_no_number_of_frames(value: Any) -> None:
    tiny, feed = oracle.subject("llava"), zoo.inputs("llava", "image")
    wanted = "frames_at_once must be a whole number of frames, at least 1, got "
    with pytest.raises(MmaccelError, match=wanted):
        accelerate_vlm(tiny, "divprune", frames_at_once=value)
    with pytest.raises(MmaccelError, match=wanted):
        Recipe("none", frames_at_once=value)
    with accelerated(tiny, "divprune"), pytest.raises(MmaccelError, match=wanted):
        generate(tiny, feed, mmaccel={"frames_at_once": value})


def test_a_recipe_keeps_the_size_of_its_groups() -> None:
    made = Recipe("x", (Stage("divprune", 0.5),), frames_at_once=8)
    assert Recipe.from_json(made.to_json()) == made and "frames_at_once=8" in str(made)
    assert made.override(frames_at_once=4).frames_at_once == 4
    with pytest.raises(UnsupportedError, match="frames_at_once=8 is for transformers"):
        settings_of({"recipe": "divprune", "frames_at_once": 8})


def test_lossless_answers_come_of_groups_too() -> None:
    """Groups change no answer: the bare model that verifies encodes in groups."""
    tiny, feed = oracle.subject("qwen2_5_vl"), zoo.inputs("qwen2_5_vl", "images")
    wanted = tiny.generate(**feed, max_new_tokens=4, do_sample=False)
    with accelerated(tiny, "divprune", lossless=True, lookup=True, frames_at_once=1):
        got = tiny.generate(**feed, max_new_tokens=4, do_sample=False)
        assert any("in 2 groups" in note for note in tiny.mmaccel.stats()["notes"])
    assert (got == wanted).all()
