"""What the package ``mmaccel`` offers: the one list of its names, which type checkers and editors read, and it does itself.

The second part are the classes of all methods, to be given as recipes: ``accelerate_vlm(model, FastV(layer=3), retain=0.25)``.
"""

from .accelerate import (
    Accelerator,
    EncoderAccelerator,
    Fallback,
    accelerate_encoder,
    accelerate_vlm,
    accelerated,
    accelerated_encoder,
    handle,
    is_accelerated,
)
from .core.recipe_names import RecipeName
from .core.reduction import Reduction
from .core.version import __version__
from .errors import MmaccelError, UnsupportedError
from .families.load import load
from .media.aging import age_pictures
from .media.prepare import prepare
from .method.base import Method
from .method.registry import get_method, methods, register
from .programs.cache_file import load_cache, save_cache
from .programs.long_video import read_video
from .programs.prompt_cache import PromptCache
from .programs.streaming import VideoSession
from .programs.tune.tuning import tune
from .programs.video_qa.qa import answer_videos
from .recipe.lookup import get_recipe, recipes
from .recipe.recipe import Recipe, Stage

# isort: split
from .encoders.earlytom import EarlyTomFrames as EarlyTomFrames
from .encoders.evit import EViT as EViT
from .encoders.ipcv import Ipcv as Ipcv
from .encoders.pitome import PiToMe as PiToMe
from .encoders.pixelprune import PixelPrune as PixelPrune
from .encoders.stc_cacher import StcCacher as StcCacher
from .encoders.tome import ToMe as ToMe
from .frames.clip_crop import ClipCrop as ClipCrop
from .frames.distinct import DistinctFrames as DistinctFrames
from .frames.query import QueryFrames as QueryFrames
from .frames.resize import Resize as Resize
from .frames.scenes import SceneFrames as SceneFrames
from .frames.scenetilling import SceneTilling as SceneTilling
from .frames.uniform import UniformFrames as UniformFrames
from .kv.codecs.calibquant import CalibQuant as CalibQuant
from .kv.codecs.fp8 import FP8 as FP8
from .kv.codecs.gear import GEAR as GEAR
from .kv.codecs.kivi import KIVI as KIVI
from .kv.codecs.nsnquant import NSNQuant as NSNQuant
from .kv.codecs.qserve import QServe as QServe
from .kv.codecs.think import ThinK as ThinK
from .kv.codecs.turboquant import TurboQuant as TurboQuant
from .kv.codecs.vidkv import VidKV as VidKV
from .kv.codecs.zipcache_codec import ZipCacheCodec as ZipCacheCodec
from .kv.policies.a2sf import A2SF as A2SF
from .kv.policies.capkv import CapKV as CapKV
from .kv.policies.clusterkv import ClusterKV as ClusterKV
from .kv.policies.compactor import Compactor as Compactor
from .kv.policies.criticalkv import CriticalKV as CriticalKV
from .kv.policies.cur import CUR as CUR
from .kv.policies.dca import DualChunkAttention as DualChunkAttention
from .kv.policies.doublesparsity import DoubleSparsity as DoubleSparsity
from .kv.policies.duoattention import DuoAttention as DuoAttention
from .kv.policies.dycoke_cache import DyCokeCache as DyCokeCache
from .kv.policies.elastic_cache import ElasticCache as ElasticCache
from .kv.policies.em_llm import EMLLM as EMLLM
from .kv.policies.expected_attention import ExpectedAttention as ExpectedAttention
from .kv.policies.frame_bounds import FrameBounds as FrameBounds
from .kv.policies.h2o import H2O as H2O
from .kv.policies.hermes import HERMES as HERMES
from .kv.policies.infinigen import InfiniGen as InfiniGen
from .kv.policies.infinipot_v import InfiniPotV as InfiniPotV
from .kv.policies.infllm import InfLLM as InfLLM
from .kv.policies.keydiff import KeyDiff as KeyDiff
from .kv.policies.keyformer import Keyformer as Keyformer
from .kv.policies.knorm import KNorm as KNorm
from .kv.policies.kvzip import KVzip as KVzip
from .kv.policies.lagkv import LagKV as LagKV
from .kv.policies.laq import LAQ as LAQ
from .kv.policies.leverage import Leverage as Leverage
from .kv.policies.loki import Loki as Loki
from .kv.policies.lserve import LeoAM as LeoAM
from .kv.policies.lserve import LServe as LServe
from .kv.policies.magicdec import MagicDec as MagicDec
from .kv.policies.morphkv import MorphKV as MorphKV
from .kv.policies.mpcache import MPCache as MPCache
from .kv.policies.mustdrop_cache import MustDropCache as MustDropCache
from .kv.policies.noncausal_attention import NonCausalAttention as NonCausalAttention
from .kv.policies.observed_attention import ObservedAttention as ObservedAttention
from .kv.policies.qfilter import QFilter as QFilter
from .kv.policies.quest import Quest as Quest
from .kv.policies.quickprefill import QuickPrefill as QuickPrefill
from .kv.policies.raas import RaaS as RaaS
from .kv.policies.razorattention import RazorAttention as RazorAttention
from .kv.policies.recycled_attention import RecycledAttention as RecycledAttention
from .kv.policies.rekv import ReKV as ReKV
from .kv.policies.rpc import RPC as RPC
from .kv.policies.sentencekv import SentenceKV as SentenceKV
from .kv.policies.sepllm import SepLLM as SepLLM
from .kv.policies.shadowkv import ShadowKV as ShadowKV
from .kv.policies.sirllm import SirLLM as SirLLM
from .kv.policies.snapkv import SnapKV as SnapKV
from .kv.policies.speckv import SpecKV as SpecKV
from .kv.policies.squeezed_attention import SqueezedAttention as SqueezedAttention
from .kv.policies.streaming_llm import StreamingLLM as StreamingLLM
from .kv.policies.streamingtom import StreamingTOM as StreamingTOM
from .kv.policies.streammem import StreamMem as StreamMem
from .kv.policies.tokenselect import TokenSelect as TokenSelect
from .kv.policies.tova import Tova as Tova
from .kv.policies.triforce import TriForce as TriForce
from .kv.policies.vatp import VATP as VATP
from .kv.policies.visionpulse import VisionPulse as VisionPulse
from .kv.policies.visual_context_window import VisualContextWindow as VisualContextWindow
from .kv.policies.vl_cache import VLCache as VLCache
from .kv.policies.windowkv import WindowKV as WindowKV
from .kv.policies.zeromerge import ZeroMerge as ZeroMerge
from .kv.policies.zipcache_tokens import ZipCacheTokens as ZipCacheTokens
from .layers.aim import AimPageRank as AimPageRank
from .layers.apet import ApETStep as ApETStep
from .layers.clse import CLSE as CLSE
from .layers.dart import DART as DART
from .layers.fastkv import FastKVTokens as FastKVTokens
from .layers.fastv import FastV as FastV
from .layers.framefusion import FrameFusion as FrameFusion
from .layers.hawk import HAWK as HAWK
from .layers.holitom import HoliTomInner as HoliTomInner
from .layers.homer import HOMER as HOMER
from .layers.ivcprune import IVCPrune as IVCPrune
from .layers.lazyllm import LazyLLM as LazyLLM
from .layers.mcmoe import MCMoE as MCMoE
from .layers.memvr import MemVR as MemVR
from .layers.metok import METokPrune as METokPrune
from .layers.mustdrop import MustDropFilter as MustDropFilter
from .layers.priortr import PriorTR as PriorTR
from .layers.promptdistill import PromptDistill as PromptDistill
from .layers.prunevid import PruneVidSelect as PruneVidSelect
from .layers.pyramiddrop import PyramidDrop as PyramidDrop
from .layers.sparsevlm import SparseVLM as SparseVLM
from .layers.sttm import Sttm as Sttm
from .layers.v2drop import V2Drop as V2Drop
from .layers.vasparse import VASparse as VASparse
from .layers.vflowopt import VFlowOptInner as VFlowOptInner
from .layers.zipvl import ZipVL as ZipVL
from .merging.aim import AimMerge as AimMerge
from .merging.apet import ApETMerge as ApETMerge
from .merging.centerclip import CenterClip as CenterClip
from .merging.dycoke import DyCokeTTM as DyCokeTTM
from .merging.earlytom import EarlyTomTokens as EarlyTomTokens
from .merging.evad import Evad as Evad
from .merging.everest import Everest as Everest
from .merging.evs import Evs as Evs
from .merging.fastvid import FastVID as FastVID
from .merging.flashvid import FlashVIDMerge as FlashVIDMerge
from .merging.forestprune import ForestPrune as ForestPrune
from .merging.free_video_llm import FreeVideoLlm as FreeVideoLlm
from .merging.holitom import HoliTomMerge as HoliTomMerge
from .merging.kitoke import KiToke as KiToke
from .merging.longvlm import LongVlm as LongVlm
from .merging.metok import METokMerge as METokMerge
from .merging.moviechat import MovieChat as MovieChat
from .merging.moviechat_memory import MovieChatMemory as MovieChatMemory
from .merging.mustdrop import MustDropMerge as MustDropMerge
from .merging.omnizip import OmniZip as OmniZip
from .merging.pool import Pool as Pool
from .merging.progressive_pool import ProgressivePool as ProgressivePool
from .merging.prunevid import PruneVidMerge as PruneVidMerge
from .merging.qg_vtc import QGVTC as QGVTC
from .merging.restore import RestoreMerge as RestoreMerge
from .merging.spacetime import SpaceTime as SpaceTime
from .merging.stc import StcPruner as StcPruner
from .merging.streamdvc import StreamDvc as StreamDvc
from .merging.streamingtom_ctr import StreamingTOMReduction as StreamingTOMReduction
from .merging.streamvln import StreamVln as StreamVln
from .merging.tempme import TempMe as TempMe
from .merging.vcast import VCAST as VCAST
from .merging.vflowopt import VFlowOptMerge as VFlowOptMerge
from .merging.vidcom2 import VidCom2 as VidCom2
from .merging.vtm import Vtm as Vtm
from .pruning.attention_received import AttentionReceived as AttentionReceived
from .pruning.balanced import Balanced as Balanced
from .pruning.cdpruner import CDPruner as CDPruner
from .pruning.coverage import Coverage as Coverage
from .pruning.divprune import DivPrune as DivPrune
from .pruning.fastervlm import FasterVLM as FasterVLM
from .pruning.flexselect import FlexSelect as FlexSelect
from .pruning.fopru import FoPru as FoPru
from .pruning.gemfilter import GemFilter as GemFilter
from .pruning.hiprune import HiPrune as HiPrune
from .pruning.hired import HiRED as HiRED
from .pruning.holov import HoloV as HoloV
from .pruning.learned import Learned as Learned
from .pruning.mmr import MMR as MMR
from .pruning.mmtok import MMTok as MMTok
from .pruning.otprune import OTPrune as OTPrune
from .pruning.prumerge import PruMerge as PruMerge
from .pruning.prumerge import PruMergePlus as PruMergePlus
from .pruning.prunesid import PruneSID as PruneSID
from .pruning.random import Random as Random
from .pruning.reform import REFORM as REFORM
from .pruning.representation_shift import RepresentationShift as RepresentationShift
from .pruning.scope import SCOPE as SCOPE
from .pruning.specpc import SpecPC as SpecPC
from .pruning.specprefill import SpecPrefill as SpecPrefill
from .pruning.specvlm import SpecVLM as SpecVLM
from .pruning.tokencorr import TokenCorr as TokenCorr
from .pruning.uniform import Uniform as Uniform
from .pruning.visiontrim import VisionTrim as VisionTrim
from .pruning.visionzip import VisionZip as VisionZip
from .pruning.vispruner import VisPruner as VisPruner
from .pruning.vtc_cls import VtcCls as VtcCls

__all__ = [
    "Accelerator",
    "EncoderAccelerator",
    "Fallback",
    "Method",
    "MmaccelError",
    "PromptCache",
    "Recipe",
    "RecipeName",
    "Reduction",
    "Stage",
    "UnsupportedError",
    "VideoSession",
    "__version__",
    "accelerate_encoder",
    "accelerate_vlm",
    "accelerated",
    "accelerated_encoder",
    "age_pictures",
    "answer_videos",
    "get_method",
    "get_recipe",
    "handle",
    "is_accelerated",
    "load",
    "load_cache",
    "methods",
    "prepare",
    "read_video",
    "recipes",
    "register",
    "save_cache",
    "tune",
]
