"""Selectors between the encoder and the language model: what each promises beyond the laws of all methods."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import synthetic
import torch
import zoo
from batches import dense
from laws.helpers import model
from tiled import COUNTS, batch_of, row_of

import mmaccel
from mmaccel import MmaccelError, UnsupportedError, accelerated
from mmaccel.core.budget import resolve
from mmaccel.method import PreviewMethod, ProjectorMethod, TokenMethod
from mmaccel.pruning import prumerge
from mmaccel.pruning.fopru import FoPru
from mmaccel.pruning.hired import HiRED
from mmaccel.pruning.prumerge import PruMerge, PruMergePlus
from mmaccel.pruning.visionzip import VisionZip
from mmaccel.pruning.vispruner import VisPruner

#: the choices of papers between encoder and language model, by name; a first pass of layers needs a model (test_layers)
PRUNING = {
    name: kind
    for name, kind in synthetic.offered(ProjectorMethod).items()
    if kind.paper and kind.__module__.startswith("mmaccel.pruning.") and not issubclass(kind, PreviewMethod)
}
#: every one as it comes, and some with other options
METHODS = [
    *(kind() for kind in PRUNING.values()),
    FoPru(strategy="row"),
    HiRED(alpha=0.3).by("official"),
    PruMerge(adaptive=False, query="all", neighbours=3),
    PruMergePlus(adaptive=False),
    VisionZip(contextual=3, query="all", weights="mean"),
    VisPruner(important=0.0, step=3, query="all"),
]
named = pytest.mark.parametrize("method", METHODS, ids=repr)


# --- all of them ------------------------------------------------------------------------------------------------------
@named
def test_budgets(method: TokenMethod) -> None:
    tokens = batch_of()
    sizes = tokens.valid.sum(1)
    for share in (0.0, 0.01, 0.2, 0.5, 0.83, 0.99, 1.0):
        count = (sizes * share).long().clamp(min=1)
        made = method.reduce(tokens, count)
        kept = made.kept.sum(1)
        assert not (made.kept & ~tokens.valid).any() and (kept >= 1).all() and (kept <= count).all()
        # the program's bands leave some unspent, and an adaptive choice may want less
        if not (method.official and method.name == "hired") and not getattr(
            method, "adaptive", method.budget == "adaptive"
        ):
            assert torch.equal(kept, count)
        out = made.apply(tokens.features)
        assert not out.isnan().any() and not dense(made).isnan().any()


@named
def test_whole_budget_keeps_everything(method: TokenMethod) -> None:
    tokens = batch_of()
    made = method.reduce(tokens, tokens.valid.sum(1))
    if not getattr(method, "adaptive", method.budget == "adaptive"):
        assert made.is_identity
        assert torch.equal(made.apply(tokens.features), tokens.features * tokens.valid[..., None])


@named
def test_row_of_a_batch_is_the_row_alone(method: TokenMethod) -> None:
    tokens = batch_of()
    together = method.reduce(tokens, COUNTS)
    for row in range(len(COUNTS)):
        alone = method.reduce(row_of(tokens, row), COUNTS[row : row + 1])
        n = alone.kept.shape[1]
        assert torch.equal(together.kept[row, :n], alone.kept[0]) and not together.kept[row, n:].any()
        assert torch.equal(dense(together)[row, :n, :n], dense(alone)[0])


@named
def test_repeats_itself_and_leaves_inputs_alone(method: TokenMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, untouched = batch_of(), batch_of()
    first = method.reduce(tokens, COUNTS)
    # blocks of a few rows give the same
    monkeypatch.setattr(prumerge, "BLOCK", 700)
    second = method.reduce(tokens, COUNTS)
    assert torch.equal(first.kept, second.kept) and torch.equal(dense(first), dense(second))
    assert torch.equal(tokens.features, untouched.features)
    assert all(torch.equal(v.nan_to_num(), untouched.signals[k].nan_to_num()) for k, v in tokens.signals.items())


@named
def test_half_precision_and_empty_budgets(method: TokenMethod) -> None:
    tokens = batch_of()
    tokens = replace(tokens, features=tokens.features.bfloat16())
    made = method.reduce(tokens, torch.tensor([6, 0, 9, 1, 0, 4]))
    assert torch.equal(made.kept.any(1), torch.tensor([True, False, True, True, False, True]))
    assert made.apply(tokens.features).dtype == torch.bfloat16


@named
def test_equal_tokens_and_no_sources(method: TokenMethod) -> None:
    """Flat scores favour the lower slots; units that the tower says nothing about still meet the budget."""
    tokens = batch_of([[(1, 4, 4, False)]])
    flat = {name: torch.ones_like(value) for name, value in tokens.signals.items()}
    same = replace(tokens, features=torch.ones_like(tokens.features), signals=flat)
    kept = method.reduce(same, torch.tensor([5])).kept[0]
    # VisPruner removes the first of equals, as its program does
    assert 1 <= int(kept.sum()) <= 5 and (kept[0] or getattr(method, "important", 1.0) == 0.0)
    lost = {name: torch.full_like(value, torch.nan) for name, value in tokens.signals.items()}
    made = method.reduce(replace(tokens, signals=lost), torch.tensor([5]))
    assert int(made.kept.sum()) == 5 or (method.official and method.name == "hired")
    assert not made.apply(tokens.features).isnan().any()


def test_they_are_registered_with_the_papers_defaults() -> None:
    for name in PRUNING:
        cls = mmaccel.get_method(name)
        assert cls.name == name and cls.paper and mmaccel.get_recipe(name).build()
    assert mmaccel.get_recipe("hired").retain == 0.2 and mmaccel.get_recipe("prumerge").retain == 1.0
    assert HiRED().official_count(0.29, 100) == 28 and FoPru().official_count(0.29, 100) == 28
    assert PruMerge().official_count(0.125, 576) == 73
    # whole rows where the picture is one grid: half of 5 rows rounds to even
    rows = FoPru(strategy="row")
    assert rows.official_count(0.5, 20, (1, 5, 4)) == 8 and rows.official_count(0.01, 20, (1, 5, 4)) == 4
    assert rows.official_count(0.5, 25, (1, 5, 4)) == 12 == rows.official_count(0.5, 25)
    assert FoPru().official_count(0.5, 25, (1, 5, 5)) == 12


@pytest.mark.parametrize(
    "make",
    [
        lambda: HiRED(alpha=1.5),
        lambda: FoPru(strategy="column"),  # type: ignore[arg-type]
        lambda: FoPru(query="text"),  # type: ignore[arg-type]
        lambda: VisionZip(contextual=1.5),
        lambda: VisionZip(contextual=-1),
        lambda: VisionZip(weights="sum"),  # type: ignore[arg-type]
        lambda: VisPruner(important=-0.1),
        lambda: VisPruner(step=0),
        lambda: PruMerge(neighbours=-1),
    ],
)
def test_impossible_options_are_refused(make) -> None:
    with pytest.raises(MmaccelError):
        make()


# --- on models --------------------------------------------------------------------------------------------------------
def asked_of_cls(kind: type[ProjectorMethod]) -> dict[str, str] | None:
    """The options with which a method asks the CLS token, none if it has no other way; None if it never does."""
    options = {"query": "cls"} if "query" in {option.name for option in fields(kind)} else {}
    try:
        kind(**options).check(SimpleNamespace(name="no CLS", has_cls=False))  # type: ignore[arg-type]
    except UnsupportedError:
        return options
    return None


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
@pytest.mark.parametrize("name", PRUNING)
def test_on_models(family: str, name: str) -> None:
    tiny = model(family)
    options = asked_of_cls(PRUNING[name])
    if family == "qwen2_5_vl" and options is not None:
        with pytest.raises(UnsupportedError, match="CLS token, which the vision tower of qwen2_5_vl lacks"):
            mmaccel.accelerate_vlm(tiny, name, **options)
        if not options:
            return
    feed = zoo.inputs(family, "uneven", batch=2)
    with accelerated(tiny, name, retain=0.3), torch.no_grad():
        out = tiny(**feed)
        layout, kept = tiny.mmaccel.layout, tiny.mmaccel.reduction.kept
        stats = tiny.mmaccel.stats()
    assert not out.logits[:, -1].isnan().any()
    total = 0
    for picture in {s.picture for s in layout.segments}:
        mine = [s for s in layout.segments if s.picture == picture]
        size, stays = sum(len(s.places) for s in mine), sum(int(kept[s.row, s.places].sum()) for s in mine)
        budget = resolve(0.3, size)
        assert 1 <= stays <= budget and (PRUNING[name].budget == "adaptive" or stays == budget)
        total += stays
    assert stats["stages"][0]["tokens_kept"] == total


def test_merged_values_reach_the_language_model() -> None:
    tiny, feed, seen = model("llava"), zoo.inputs("llava"), []
    handle = tiny.model.language_model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        with accelerated(tiny, "visionzip", retain=8), torch.no_grad():
            tiny(**feed)
            made = tiny.mmaccel.reduction
        with torch.no_grad():
            tiny(**feed)
    finally:
        handle.remove()
    torch.testing.assert_close(seen[0], made.apply(seen[1]))
    assert made.links is not None


def test_cls_is_not_asked_where_there_is_none() -> None:
    siglip = SimpleNamespace(name="llava_onevision", has_cls=False)
    for kind in (kind for kind in PRUNING.values() if asked_of_cls(kind)):
        method = kind(query="cls")
        with pytest.raises(UnsupportedError, match="query='all'"):
            method.check(siglip)  # type: ignore[arg-type]
        replace(method, query="all").check(siglip)  # type: ignore[arg-type]
        if kind is not FoPru:
            fitted = kind().fit(siglip)  # type: ignore[arg-type]
            assert fitted.query == "all" and kind().fit(SimpleNamespace(has_cls=True)).query == "cls"  # type: ignore
    with pytest.raises(UnsupportedError, match="fopru"):
        HiRED().check(siglip)  # type: ignore[arg-type]
