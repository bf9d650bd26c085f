"""Merging inside image encoders by themselves: the tower written out, what a user relies on, refusals."""

from __future__ import annotations

import copy
import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import zoo
from laws.helpers import model
from small import METHODS, PATCHES, QUICK, TEXT, WITH_CLS, encoder, features, make, pixels
from tail import few
from torch import Tensor, nn

import mmaccel
from mmaccel import (
    MmaccelError,
    Recipe,
    Stage,
    UnsupportedError,
    accelerate_encoder,
    accelerated_encoder,
)
from mmaccel.media.draw import overlay
from mmaccel.method import EncoderMethod, EncoderTokens

pytestmark = pytest.mark.usefixtures("no_gradients")


# --- written out by hand ----------------------------------------------------------------------------------------------
def halves(layer: Any) -> SimpleNamespace:
    """The parts of a layer of either library."""
    if hasattr(layer, "self_attn"):
        a = layer.self_attn
        return SimpleNamespace(
            first=layer.layer_norm1, q=a.q_proj, k=a.k_proj, v=a.v_proj, out=a.out_proj, heads=a.num_heads,
            second=lambda x: layer.mlp(layer.layer_norm2(x)), scale=lambda x: x, norms=(lambda x: x, lambda x: x),
        )  # fmt: skip
    a = layer.attn
    weights, biases = a.in_proj_weight.chunk(3), a.in_proj_bias.chunk(3)
    q, k, v = (functools.partial(nn.functional.linear, weight=w, bias=b) for w, b in zip(weights, biases, strict=True))
    same = nn.Identity()
    return SimpleNamespace(
        first=layer.ln_1, q=q, k=k, v=v, out=a.out_proj, heads=a.num_heads, scale=layer.ls_1,
        second=lambda x: layer.ls_2(layer.mlp(layer.ln_2(x))),
        norms=(getattr(a, "ln_q", same), getattr(a, "ln_k", same)),
    )  # fmt: skip


def by_hand(layers: Any, x: Tensor, method: EncoderMethod, kept: int, cls: int) -> Tensor:
    """One picture ``x [T, C]`` through the layers, merging between attention and MLP; the full grid behind the last."""
    groups = [[i] for i in range(len(x))]
    plan = method.schedule(len(x) - cls, len(layers), kept)
    for number, (layer, remove) in enumerate(zip(layers, plan, strict=True)):
        part = halves(layer)
        normed = part.first(x)
        q, k, v = (p(normed).unflatten(-1, (part.heads, -1)).transpose(0, 1) for p in (part.q, part.k, part.v))
        q, k = part.norms[0](q), part.norms[1](k)
        logits = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        size = torch.tensor([float(len(group)) for group in groups])
        if method.proportional:
            logits = logits + size.log()
        attention = logits.softmax(-1)
        x = x + part.scale(part.out((attention @ v).transpose(0, 1).flatten(1)))
        if remove:
            seen = attention.mean(0)[0]
            tokens = EncoderTokens(k.mean(0)[None], size[None], cls, number / len(layers), seen[None])
            target = method.match(tokens, remove)[0].tolist()
            assert sum(t != i for i, t in enumerate(target)) == remove
            sums, joined = [], []
            for slot in range(len(x)):
                members = [i for i, t in enumerate(target) if t == slot]
                if not members:
                    continue
                if method.name == "evit" and len(members) > 1:
                    # fused, or dropped
                    sums.append(sum(seen[i] * x[i] for i in members) if method.fuse else x[slot])
                else:
                    sums.append(sum(size[i] * x[i] for i in members) / size[members].sum())
                joined.append([i for m in members for i in groups[m]])
            x, groups = torch.stack(sums), joined
        x = x + part.second(x)
    assert len(groups) == kept + cls
    full = torch.empty(sum(map(len, groups)), x.shape[1])
    for token, group in zip(x, groups, strict=True):
        full[group] = token
    return full


def layers_of(made: Any) -> tuple[nn.Module, Any]:
    """The module that runs the layers, and the layers."""
    if hasattr(made, "config"):
        tower = getattr(made, "vision_model", made)
        return tower.encoder, tower.encoder.layers
    tower = getattr(made, "visual", made)
    return tower.transformer, tower.transformer.resblocks


def through(made: Any, given: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into the layers, and what comes out behind them."""
    caught: list[Tensor] = []
    runs, layers = layers_of(made)
    handles = [
        layers[0].register_forward_pre_hook(lambda module, args: caught.append(args[0]), prepend=True),
        runs.register_forward_hook(
            lambda module, args, out: caught.append(out if isinstance(out, Tensor) else out.last_hidden_state)
        ),
    ]
    features(made, given)
    for handle in handles:
        handle.remove()
    return caught[0], caught[1]


CASES = [
    *((name, method, {}, 0.5) for name, method in METHODS),
    *((name, "tome", {"pace": "decreasing"}, 0.4) for name in ("clip", "siglip", "open_clip")),
    *((name, "pitome", {"matching": "bsm"}, 0.4) for name in ("clip", "siglip")),
    ("clip", "pitome", {"matching": "text"}, 0.4),
    ("clip", "pitome", {"margin": 0.75}, 0.3),
    ("clip", "tome", {}, 10),
    ("open_clip", "evit", {}, 2),
    ("clip", "tome", {"coarse": True}, 0.4),
    ("clip", "tome", {"pace": 0.5}, 0.5),
    ("clip", "tome", {"pace": (3.0, 1.0)}, 0.6),
    ("clip", "evit", {"fuse": False}, 0.4),
]


@pytest.mark.parametrize(("name", "method", "options", "retain"), CASES)
def test_the_tower_is_the_tower_written_out(name: str, method: str, options: dict[str, Any], retain: float) -> None:
    """Attention weighed by sizes, the merge, then the MLP; values within float32 of a forward in plain loops."""
    made, given = encoder(name), pixels(2)
    cls, kept = int(name in WITH_CLS), retain if isinstance(retain, int) else int(retain * PATCHES + 0.5)
    with accelerated_encoder(made, method, retain=retain, **options):
        start, got = through(made, given)
        assert made.mmaccel.reduction.kept.sum(1).tolist() == [kept, kept]
    layers = layers_of(made)[1]
    built = mmaccel.get_method(method)(**options)
    wanted = torch.stack([by_hand(layers, x, built, kept, cls) for x in start])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
    bare = through(made, given)[1]
    assert float((got - bare).abs().max()) > 1e-2, "merging moved nothing: this case proves nothing"


def test_the_margin_falls_with_depth() -> None:
    """In the first layer almost nothing is alike, in the last almost everything."""
    keys = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(1))
    size = torch.ones(1, 30)
    chosen = mmaccel.get_method("pitome")()
    for depth in (0.0, 0.5, 0.75):
        fixed = mmaccel.get_method("pitome")(margin=0.9 * (1 - depth))
        assert torch.equal(
            chosen.match(EncoderTokens(keys, size, 1, depth), 9), fixed.match(EncoderTokens(keys, size, 1), 9)
        )
    targets = [chosen.match(EncoderTokens(keys, size, 1, depth), 9) for depth in (0.0, 0.9)]
    assert not torch.equal(*targets)


@pytest.mark.parametrize("tokens", [1, 2, 7, 196, 576])
def test_evit_schedule(tokens: int) -> None:
    method = mmaccel.get_method("evit")()
    for layers in (1, 2, 3, 12, 24):
        for kept in {1, tokens // 3, tokens - 1, tokens} - {0}:
            plan = method.schedule(tokens, layers, kept)
            assert len(plan) == layers and sum(plan) == tokens - kept and min(plan) >= 0
            assert sum(r > 0 for r in plan) <= 3
    plan = method.schedule(196, 12, 71)
    assert [i for i, r in enumerate(plan) if r] == [3, 6, 9]
    left = [196 - sum(plan[: i + 1]) for i in (3, 6, 9)]
    assert left == [139, 99, 71], "the paper's 0.7 at the layers 4, 7 and 10 of 12"
    with pytest.raises(MmaccelError, match="larger budget"):
        method.schedule(4, 12, 0)


# --- what a user relies on --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "method"), few(METHODS, QUICK))
def test_features_keep_their_shape_and_meaning(name: str, method: str) -> None:
    made, given = encoder(name), pixels()
    bare = features(made, given)
    with accelerated_encoder(made, method, retain=0.5):
        out = features(made, given)
        stats = made.mmaccel.stats()
    assert out.shape == bare.shape and out.dtype == bare.dtype and bool(out.isfinite().all())
    assert not torch.equal(out, bare)
    assert (stats["tokens_in"], stats["resolved"], stats["tokens_kept"]) == (108, 54, 54)
    assert stats["recipe"] == stats["method"] == method and stats["seconds"]["encoder"] > 0


@pytest.mark.parametrize(("name", "method"), few(METHODS, QUICK))
def test_keeping_everything_is_the_bare_encoder(name: str, method: str) -> None:
    made, given = encoder(name), pixels()
    bare = features(made, given)
    with accelerated_encoder(made, method, retain=1.0):
        assert torch.equal(features(made, given), bare)
        assert made.mmaccel.stats()["tokens_kept"] == 108 and made.mmaccel.reduction is None


@pytest.mark.parametrize(("name", "method"), few(METHODS, QUICK))
def test_a_batch_is_its_pictures_alone(name: str, method: str) -> None:
    made, given = encoder(name), pixels(4)
    with accelerated_encoder(made, method, retain=0.4):
        together, kept = features(made, given), made.mmaccel.reduction.kept
        for row in range(4):
            torch.testing.assert_close(features(made, given[row : row + 1])[0], together[row], rtol=1e-4, atol=1e-5)
            assert torch.equal(made.mmaccel.reduction.kept[0], kept[row])


def snapshot(made: Any) -> list[Any]:
    """All that could be left behind: hooks, attributes, configurations, classes, tensors."""
    out: list[Any] = []
    for name, module in made.named_modules():
        hooks = [len(module._forward_hooks), len(module._forward_pre_hooks), len(module._forward_hooks_always_called)]
        hooks += [len(module._forward_pre_hooks_with_kwargs), len(module._forward_hooks_with_kwargs)]
        config = getattr(module, "config", None)
        out.append((name, type(module), hooks, sorted(module.__dict__), getattr(config, "_attn_implementation", None)))
        out.append(None if config is None else config.to_dict())
    return out


@pytest.mark.parametrize(("name", "method"), few(METHODS, QUICK))
def test_remove_leaves_nothing(name: str, method: str) -> None:
    made, given = make(name), pixels()
    bare, before = features(made, given), snapshot(made)
    weights = {key: value.clone() for key, value in made.state_dict().items()}
    assert accelerate_encoder(made, method, retain=0.4) is made
    assert snapshot(made) != before
    features(made, given)
    made.mmaccel.remove()
    assert snapshot(made) == before and not hasattr(made, "mmaccel")
    assert all(torch.equal(value, weights[key]) for key, value in made.state_dict().items())
    assert torch.equal(features(made, given), bare)


def test_the_last_recipe_counts_and_the_block_brings_back_the_one_before() -> None:
    made, given = make("clip"), pixels()
    before = snapshot(made)
    accelerate_encoder(made, "tome", retain=0.5)
    tome = features(made, given)
    with accelerated_encoder(made, "pitome", retain=0.3):
        assert made.mmaccel.recipe.name == "pitome"
        assert not torch.equal(features(made, given), tome)
        made.mmaccel.remove()
    assert torch.equal(features(made, given), tome) and made.mmaccel.recipe.name == "tome"
    with pytest.raises(MmaccelError):
        accelerate_encoder(made, "tome", retain=2.5)
    with pytest.raises(MmaccelError, match="divprune"):
        accelerate_encoder(made, "divprune")
    assert torch.equal(features(made, given), tome), "a refused recipe took the one before away"
    made.mmaccel.remove()
    assert snapshot(made) == before


@pytest.mark.parametrize("name", ["clip-whole", "siglip-whole", "open_clip-whole"])
def test_the_text_tower_stays_as_it_is(name: str) -> None:
    made = encoder(name)
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))

    def text() -> Tensor:
        if hasattr(made, "encode_text"):
            return made.encode_text(ids)
        out = made.get_text_features(input_ids=ids)
        return out if isinstance(out, Tensor) else out.pooler_output

    bare = text()
    with accelerated_encoder(made, "tome", retain=0.4):
        assert torch.equal(text(), bare)
        if hasattr(made, "config"):
            out = made(input_ids=ids, pixel_values=pixels(2))
            assert out.logits_per_image.shape == (2, 2)
            alone = made.vision_model(pixel_values=pixels(2)).last_hidden_state
            torch.testing.assert_close(out.vision_model_output.last_hidden_state, alone)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_eager_attention_agrees(name: str) -> None:
    made, given = make(name), pixels()
    with accelerated_encoder(made, "tome", retain=0.4):
        wanted = features(made, given)
    made.set_attn_implementation("eager")
    with accelerated_encoder(made, "tome", retain=0.4):
        torch.testing.assert_close(features(made, given), wanted, rtol=1e-4, atol=1e-5)
    assert made.config._attn_implementation == "eager"


@pytest.mark.parametrize(("name", "method"), few(METHODS, QUICK))
def test_bfloat16(name: str, method: str) -> None:
    made, given = make(name).to(torch.bfloat16), pixels().to(torch.bfloat16)
    with accelerated_encoder(made, method, retain=0.5):
        out = features(made, given)
    assert out.dtype == torch.bfloat16 and bool(out.isfinite().all())


@pytest.mark.parametrize("name", ["clip", "open_clip"])
def test_gradients_flow_through_a_merge(name: str) -> None:
    """For saliency maps: an encoder in eval mode, called with gradients on."""
    made, given = make(name), pixels(1).requires_grad_()
    random = torch.Generator().manual_seed(5)
    direction = torch.randn(given.shape, generator=random)
    weight = torch.randn(features(made, given).shape, generator=random)
    with accelerated_encoder(made, "tome", retain=0.5):
        with torch.enable_grad():
            (features(made, given) * weight).sum().backward()
        up, down = ((features(made, given + step * direction) * weight).sum() for step in (1e-3, -1e-3))
    assert float((up - down) / 2e-3) == pytest.approx(float((given.grad * direction).sum()), rel=2e-2)


def test_groups_are_data_and_can_be_drawn() -> None:
    made = encoder("clip")
    with accelerated_encoder(made, "tome", retain=0.25):
        features(made, pixels(2))
        groups = made.mmaccel.reduction
    assert groups.kept.shape == (2, PATCHES) and groups.kept.sum(1).tolist() == [9, 9]
    assert groups.mass().sum(1).tolist() == [36.0, 36.0] and bool((groups.owner() >= 0).all())
    drawn = overlay(zoo.image(48, 48, 0), (6, 6), groups.owner()[1])
    assert drawn.size == (48, 48)


def test_threads_do_not_mix() -> None:
    made = encoder("clip")
    given = [pixels(1, seed) for seed in range(4)]
    with accelerated_encoder(made, "tome", retain=0.4):
        wanted = [features(made, x) for x in given]
        found: dict[int, Tensor] = {}

        def work(number: int) -> None:
            with torch.no_grad():
                for _ in range(5):
                    found[number] = features(made, given[number])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number, out in found.items():
        torch.testing.assert_close(out, wanted[number])
    assert len(found) == 4


# --- refusals ---------------------------------------------------------------------------------------------------------
def refused(call: Any, match: str, kind: type[Exception] = UnsupportedError) -> None:
    with pytest.raises(kind, match=match):
        call()


@pytest.mark.parametrize("name", ["siglip", "siglip-whole"])
def test_evit_needs_a_cls_token(name: str) -> None:
    made = encoder(name)
    refused(lambda: accelerate_encoder(made, "evit"), "evit needs a CLS token.*use 'tome' or 'pitome'")
    assert not hasattr(made, "mmaccel")


def test_what_is_no_encoder_is_refused() -> None:
    refused(lambda: accelerate_encoder(nn.Linear(2, 2), "tome"), "Linear is not a supported image encoder")
    refused(lambda: accelerate_encoder(model("llava"), "tome"), "accelerate it with accelerate_vlm")
    timm = nn.Module()
    timm.visual = nn.Module()
    timm.visual.trunk = nn.Linear(2, 2)
    refused(lambda: accelerate_encoder(timm, "tome"), "timm.*load SigLIP with transformers")
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT))
    refused(lambda: accelerate_encoder(text, "tome"), "CLIPTextModel is not a supported image encoder")


def test_recipes_of_other_sites_are_refused() -> None:
    made = encoder("clip")
    for recipe in ("divprune", "none", Recipe("two", (Stage("tome", 0.5), Stage("divprune", 0.25)))):
        refused(lambda recipe=recipe: accelerate_encoder(made, recipe), "use 'tome', 'pitome' or 'evit'", MmaccelError)
    refused(lambda: accelerate_encoder(made, "tome", pace="slow"), "pace", MmaccelError)
    assert not hasattr(made, "mmaccel")


def test_a_budget_too_small_is_refused_at_the_call_and_one_too_large_keeps_everything() -> None:
    made = encoder("clip")
    bare = features(made, pixels())
    with accelerated_encoder(made, "tome", retain=1):
        refused(lambda: features(made, pixels()), "give a larger budget", MmaccelError)
    assert torch.equal(features(made, pixels()), bare), "a failed call left something open"
    with accelerated_encoder(made, "tome", retain=37):
        assert torch.equal(features(made, pixels()), bare)
        stats = made.mmaccel.stats()
    assert stats["tokens_in"] == stats["resolved"] == stats["tokens_kept"] > 0


@pytest.mark.parametrize("name", ["clip", "open_clip"])
def test_training_and_copies_are_refused(name: str) -> None:
    made = make(name)
    with accelerated_encoder(made, "tome", retain=0.5):
        refused(lambda: copy.deepcopy(made), "cannot be copied")
        made.train()
        refused(lambda: features(made, pixels()), "call model.eval")
        made.eval()
        assert features(made, pixels()).shape[0] == 3


@pytest.mark.parametrize("name", ["open_clip", "open_clip-whole"])
def test_feature_maps_of_open_clip_are_refused(name: str) -> None:
    made = encoder(name)
    maps = made.forward_intermediates(pixels(1))["image_intermediates"]
    with accelerated_encoder(made, "tome", retain=0.5):
        refused(lambda: made.forward_intermediates(pixels(1)), "no feature maps between its layers")
    again = made.forward_intermediates(pixels(1))["image_intermediates"]
    assert len(maps) == 4 and all(torch.equal(one, two) for one, two in zip(maps, again, strict=True))


def test_a_match_of_the_wrong_size_is_named() -> None:
    """A method of somebody else's may be wrong; say so before the features are."""
    made = encoder("clip")
    with accelerated_encoder(made, "tome", retain=0.5):
        made.mmaccel.merging.method = SimpleNamespace(
            name="theirs", proportional=True, needs_cls=False, schedule=mmaccel.get_method("tome")().schedule,
            match=lambda tokens, remove: torch.arange(37).expand(3, -1),
            weigh=lambda tokens, target: torch.ones(3, 37),
        )  # fmt: skip
        refused(lambda: features(made, pixels()), "'theirs' left 111 tokens in the tower where", MmaccelError)
