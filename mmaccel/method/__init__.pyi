"""The base classes of methods, one file per site: the one list of their names."""

from .base import Grid, Method, ModelFacts, Site, Tap, TowerFacts
from .chunks import ChunkMethod
from .draft import Drafted, DraftMethod, DraftPolicy
from .encoder import EncoderMethod, EncoderTokens
from .experts import ExpertMethod
from .frame_merging import FrameMergingMethod
from .frames import FrameChoice, FramesMethod
from .guided import AttentionGuided
from .keys import CHOICES, LIMITS, CacheOptions, KeyBatch, Policy
from .layers import LayerAttention, LayerMethod, Layerwise
from .model_options import Loaded
from .patches import PatchMethod
from .preview import PreviewMethod
from .question import QuestionGuided
from .reactivation import ReactivatingMethod
from .rebuilding import RebuildingMethod
from .recall import RecallPolicy
from .registry import register
from .retracing import RetracingMethod, Shown
from .reuse import ReuseMethod
from .sparse_read import KeyUnits, Observed, Picked, ReadingPolicy, ReadStep
from .tokens import ProjectorMethod, Ranking, TokenBatch, TokenMethod

__all__ = [
    "CHOICES",
    "LIMITS",
    "AttentionGuided",
    "CacheOptions",
    "ChunkMethod",
    "DraftMethod",
    "DraftPolicy",
    "Drafted",
    "EncoderMethod",
    "EncoderTokens",
    "ExpertMethod",
    "FrameChoice",
    "FrameMergingMethod",
    "FramesMethod",
    "Grid",
    "KeyBatch",
    "KeyUnits",
    "LayerAttention",
    "LayerMethod",
    "Layerwise",
    "Loaded",
    "Method",
    "ModelFacts",
    "Observed",
    "PatchMethod",
    "Picked",
    "Policy",
    "PreviewMethod",
    "ProjectorMethod",
    "QuestionGuided",
    "Ranking",
    "ReadStep",
    "ReadingPolicy",
    "ReactivatingMethod",
    "RebuildingMethod",
    "RecallPolicy",
    "RetracingMethod",
    "ReuseMethod",
    "Shown",
    "Site",
    "Tap",
    "TokenBatch",
    "TokenMethod",
    "TowerFacts",
    "register",
]
