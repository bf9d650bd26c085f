"""Load a model and its processor from a folder or a hub id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.shipped_models import located
from ..errors import MmaccelError, UnsupportedError, first_line

if TYPE_CHECKING:
    import torch


def place(device: str | None = None) -> torch.device:
    """The device of a name, by default cuda if there is one; names of devices that this machine lacks are refused."""
    import torch

    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise MmaccelError(f"There is no device {device!r}; give cpu, cuda, or cuda:1 for the second GPU.") from None
    if where.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise MmaccelError(
                "This machine has no GPU that torch can use; run on the CPU (--device cpu, or device='cpu'), and see what "
                "mmaccel doctor says."
            )
        if where.index is not None and where.index >= count:
            raise MmaccelError(
                f"There is no {device}; this machine has {', '.join(f'cuda:{i}' for i in range(count))}."
            )
    return where


@contextmanager
def _only_downloads() -> Iterator[None]:
    """Hide progress bars of transformers, except those of downloads."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    shown, downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()  # takes those of downloads with it
    try:
        if downloads:
            enable_progress_bars()
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load(
    name: str | Path,
    *,
    device: str | None = None,
    dtype: str = "auto",
    attn: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load a model and its processor, ready to generate. Weights are read from safetensors only.

    Parameters
    ----------
    name : a folder, a hub id, or the short name of a model that comes with mmaccel (``mini-llava``, ``mini-qwen-vl``) or
        mmaccel-models (``mini-llava-deep``, ``mini-smol``).
        ``smol-pages`` is a model of pages of text around a pretrained language model (:mod:`mmaccel.families.pages`).
    device : by default cuda if there is one.
    dtype : of the weights; ``auto`` is as stored, on the CPU float32.
    attn : the attention implementation, by default that of transformers.
    trust_remote_code : run code that comes with the model.

    Raises
    ------
    MmaccelError
        If there is no such model, its family is not supported, or it does not load.

    Examples
    --------
    >>> model, processor = load("mini-llava", device="cpu")
    >>> accelerate_vlm(model, "divprune", retain=0.25).mmaccel
    <mmaccel on llava: divprune 25 %>
    >>> model.mmaccel.remove()
    """
    local, name = isinstance(name, Path), str(name)
    if not local:
        name = located(name)
    if (local or name.startswith((".", "~", "/"))) and not Path(name).is_dir():
        raise MmaccelError(f"There is no folder {name!r}; give the folder of a model, or a hub id.")
    where = place(device)
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
    from transformers.utils import logging

    from .adapted import is_adapted, load_adapted
    from .pages import is_pages, load_pages
    from .registry import families

    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    known = [kind for family in families().values() for kind in family.model_types]
    remote = {"trust_remote_code": trust_remote_code}
    pages = is_pages(name) and not Path(name).is_dir()
    if pages or is_adapted(Path(name)):
        with _only_downloads():
            if pages:
                model, processor = load_pages(name, dtype=dtype, attn=attn)
            else:
                model, processor = load_adapted(Path(name), dtype=dtype, attn=attn)
        return model.to(where).eval(), processor
    try:
        config = AutoConfig.from_pretrained(name, **remote)
        if config.model_type not in known:
            raise UnsupportedError(
                f"{name!r} is a model of type {config.model_type!r}; mmaccel supports {', '.join(known)}."
            )
        processor = AutoProcessor.from_pretrained(name, **remote)
        on_cpu = dtype == "auto" and where.type == "cpu"
        with _only_downloads():
            model = AutoModelForImageTextToText.from_pretrained(
                name,
                dtype="float32" if on_cpu else dtype,
                use_safetensors=True,
                **({"attn_implementation": attn} if attn else {}),
                **remote,
            )
        model = model.to(where).eval()
    except MmaccelError:
        raise
    except ImportError as error:
        raise MmaccelError(f"Loading {name!r} needs something that is not installed: {first_line(error)}") from error
    except Exception as error:
        raise MmaccelError(
            f"Cannot load {name!r} ({first_line(error).rstrip('.')}); give a folder with config, safetensors and processor "
            "files, or a hub id that this machine can reach."
        ) from error
    return model, processor
