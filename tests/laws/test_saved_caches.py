"""Law: a cache that was saved and loaded goes on as the one in memory does, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import synthetic
import torch
import zoo
from laws.helpers import FAMILIES, THREE_AXES, follow, generate, inputs, logits, model, recipe_of
from safetensors.torch import load_file

from mmaccel import accelerated, load_cache, save_cache
from mmaccel.errors import UnsupportedError

#: every method that leaves something in the cache, and the bare model's
METHODS = ("none", *sorted(name for name, kind in synthetic.offered().items() if kind.site not in ("frames", "decode")))


def assert_goes_on_alike(tiny: Any, kept: dict[str, Any], cache: Any, loaded: Any) -> None:
    went, same = (generate(tiny, kept, past_key_values=one) for one in (cache, loaded))
    assert torch.equal(went.sequences, same.sequences)
    assert torch.equal(logits(went), logits(same))


@pytest.mark.square(
    ("family", "method"),
    [(family, name) for family in FAMILIES for name in METHODS if name == "none" or oracle.fits(name, family)],
    of="pairs",
)
@pytest.mark.square("kind", ["image", "uneven"])
def test_a_loaded_cache_goes_on_as_the_one_in_memory(family: str, method: str, kind: str, tmp_path: Path) -> None:
    tiny, feed, file = model(family), inputs(family, kind), tmp_path / "cache.safetensors"
    second = inputs(family, "text", batch=len(feed["input_ids"]))
    with accelerated(tiny, recipe_of(method, family), processor=zoo.processor(family)):
        first = generate(tiny, feed)
        kept, _ = follow(feed, first, second)
        if method == "none" and family in THREE_AXES:
            with pytest.raises(UnsupportedError, match="M-RoPE"):
                save_cache(first.past_key_values, file, tiny)
            return
        save_cache(first.past_key_values, file, tiny)
        loaded = load_cache(file, tiny)
        assert load_file(file)
        if method != "none":
            # without room for tokens to come
            assert loaded.mmaccel.nbytes() <= first.past_key_values.mmaccel.nbytes()
        assert_goes_on_alike(tiny, kept, first.past_key_values, loaded)
