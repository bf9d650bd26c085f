"""Cosmos 3, the part that reads: the larger models are Qwen3-VL's; Edge has the tower of SigLIP 2, packed, and no DeepStack."""

from __future__ import annotations

from .qwen_vl import Qwen2VL, Qwen3VL


class Cosmos3Omni(Qwen3VL):
    """Tower and language model of Qwen3-VL; those that make pictures, sounds and actions are not loaded."""

    name = "cosmos3_omni"
    model_types = ("cosmos3_omni",)


class Cosmos3Edge(Qwen2VL):
    """The frames of a clip are runs of their own, with time stamps between them. Rows of the tower's input hold colours last,
    whose deviations are equal."""

    name = "cosmos3_edge"
    model_types = ("cosmos3_edge",)
    place = 8
    # older processors fail on clips
    since = "5.24"
    stamped = True
    layers_path = "encoder.layers"
    attention_name = "self_attn"
    usual_std = (0.5, 0.5, 0.5)
