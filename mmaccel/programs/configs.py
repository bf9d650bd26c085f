"""Model configurations as TOML tables, for models that are built with random weights."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: what ``sizes`` lists, in order; a vision tower has the first four
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
#: tiles along a side of the largest picture that ``tiles`` allows
_TILES = 6


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a TOML file by name, complete.

    A table on any level has the values of the tables that it names in ``parts`` (in ``[parts]`` or at the top of the file) and
    its own, which win. ``sizes`` lists layers, hidden size, intermediate size, heads, KV heads and vocabulary; ``tiles = N``
    allows pictures of up to 6 by 6 tiles of N pixels; ``none`` lists what is None.
    """
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    parts = tables.pop("parts")
    return {name: _complete(table, parts | tables) for name, table in tables.items()}


def _complete(value: Any, tables: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    inherited: dict[str, Any] = {}
    for name in value.get("parts", ()):
        inherited = _merged(inherited, _complete(tables[name], tables))
    own = {key: _complete(one, tables) for key, one in value.items() if key not in ("parts", "sizes", "tiles", "none")}
    own |= dict(zip(_SIZES, value.get("sizes", ()), strict=False)) | dict.fromkeys(value.get("none", ()))
    if "tiles" in value:
        sides = [value["tiles"] * count for count in range(1, _TILES + 1)]
        own["image_grid_pinpoints"] = [[height, width] for height in sides for width in sides]
    return _merged(inherited, own)


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(under[key], one) for key, one in over.items() if isinstance(one, dict) and key in under}
    return under | over | both


def make_config(table: Mapping[str, Any]) -> Any:
    """The configuration of transformers that a table holds; ``model_type`` says of which class."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**table)
