"""Law 9: methods that declare ``conserves_mass`` do, on the tokens of real models."""

from __future__ import annotations

import oracle
import pytest
import synthetic
import torch
import zoo
from laws.helpers import FAMILIES, generate, inputs, model

import mmaccel
from mmaccel import Stage, accelerated
from mmaccel.runtime.tower.merged import Merged

CONSERVING = tuple(name for name, method in synthetic.offered().items() if method.conserves_mass)
SITES = {name: mmaccel.get_method(name).site for name in CONSERVING}
KINDS = ("image", "uneven", "video")


def test_some_methods_conserve_mass() -> None:
    assert {"encoder", "projector"} <= set(SITES.values())


def _cases() -> list[tuple[str, str, str]]:
    return [
        (family, name, kind)
        for family in FAMILIES
        for name in CONSERVING
        for kind in KINDS
        if kind in zoo.kinds(family) and oracle.fits(name, family)
    ]


@pytest.mark.square(("family", "name", "kind"), _cases())
def test_weights_sum_to_one_and_masses_to_the_tokens(family: str, name: str, kind: str) -> None:
    """Every kept token is a mean: its weights sum to one; and each token with a cell counts in exactly one of them."""
    tiny, feed = model(family), inputs(family, kind)
    if SITES[name] == "encoder":
        return _encoder(family, name, kind)
    layer = {"layer": oracle.first_layer(family, name)} if SITES[name] == "layers" else {}
    with accelerated(tiny, [Stage(name, 0.3, layer)], processor=zoo.processor(family)):
        generate(tiny, feed, new=1)
        made, layout = tiny.mmaccel.reduction, tiny.mmaccel.layout
    links, width = made.full_links(), made.kept.shape[1]
    total = torch.zeros(made.kept.numel()).index_add(0, links.batch * width + links.slot, links.weight)
    assert torch.allclose(total.view_as(made.kept)[made.kept], torch.ones(int(made.kept.sum())), atol=1e-5)
    mass = made.mass()
    assert bool((mass[made.kept] >= 1).all()) and bool((mass[~made.kept] == 0).all())
    owner, wide = made.owner(), mmaccel.get_method(name).unit == "picture"
    for segment in layout.segments:
        celled = (segment.tile.cells >= 0).all(-1)
        # all tokens with a cell flow into a token of their own segment, or picture
        flows = owner[segment.row, segment.places[celled]]
        own = [s.places for s in layout.segments if s is segment or (wide and s.picture == segment.picture)]
        assert bool((flows >= 0).all()) and bool(torch.isin(flows, torch.cat(own)).all())
    dropped = made.valid & (owner < 0)
    assert float(mass.sum()) == float(made.valid.sum() - dropped.sum())
    # what a kept token stands for is as many tokens as it averages, with equal weights
    counts = torch.zeros(made.kept.numel()).index_add(0, links.batch * width + links.slot, torch.ones(len(links.slot)))
    assert torch.equal(counts.view_as(mass)[made.kept], mass[made.kept])


def _encoder(family: str, name: str, kind: str) -> None:
    """Inside the tower: sizes sum to the patches after every merge, and each patch belongs to one group."""
    tiny, seen = model(family), []
    original = Merged.merge

    def merge(self, *args):
        hidden = original(self, *args)
        counted = torch.zeros_like(self.size).index_add(0, self.owner, torch.ones(len(self.owner)))
        assert torch.equal(counted, self.size) and float(self.size.sum()) == len(self.owner)
        # weights of every group are those of a mean
        totals = torch.zeros_like(self.size).index_add(0, self.flow.group, self.flow.weight)
        assert torch.allclose(totals, torch.ones_like(totals), atol=1e-6)
        seen.append(hidden.shape[-2])
        return hidden

    Merged.merge = merge
    try:
        with accelerated(tiny, [Stage(name, 0.4)], processor=zoo.processor(family)):
            generate(tiny, inputs(family, kind), new=1)
    finally:
        Merged.merge = original
    assert len(seen) >= 2


def test_masses_add_up_over_stages() -> None:
    """Pooling and then dropping: the masses of what is left are those that pooling gave it."""
    tiny, feed = model("llava"), inputs("llava")
    with accelerated(tiny, [Stage("pool", 0.5)]):
        generate(tiny, feed, new=1)
        pooled = tiny.mmaccel.reduction
    with accelerated(tiny, [Stage("pool", 0.5), Stage("random", 0.2)]):
        generate(tiny, feed, new=1)
        both = tiny.mmaccel.reduction
    assert bool((both.kept & ~pooled.kept).sum() == 0)
    assert torch.equal(both.mass()[both.kept], pooled.mass()[both.kept])
