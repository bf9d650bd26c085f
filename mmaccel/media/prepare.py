"""Processors that apply the ``frames`` methods of a recipe to pixels."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL.Image import Image as PILImage

from ..core.transformers_api import remedy
from ..errors import MmaccelError, UnsupportedError, first_line
from ..method import FramesMethod
from ..method.frames import check_frames
from ..method.refused import described, refuse
from ..recipe import Recipe, RecipeLike, get_recipe
from ..video.decode import decode_sampled
from .picture import load_picture, on_white, to_bytes

Stages = tuple[tuple[FramesMethod, float], ...]


def prepare(processor: Any, recipe: RecipeLike = "balanced", *, retain: float | None = None, **overrides: Any) -> Any:
    """Wrap a processor so that it applies a recipe's ``frames`` methods to pictures and clips first.

    Parameters
    ----------
    processor : a processor of transformers, or an image or video processor alone. It is left as it is.
    recipe, retain, **overrides : as for :func:`mmaccel.accelerate_vlm`; give both the same.

    Returns
    -------
    A copy of ``processor`` that shares its tokenizer and settings and is an instance of its class: call it, or its
    ``apply_chat_template(..., tokenize=True)`` with pictures in the messages, as before. Pictures may be what
    :func:`~mmaccel.media.picture.load_picture` takes, or tensors, in lists of any depth; clips likewise, or lists of
    frames. Clips are reduced after the processor has sampled their frames, and their metadata follows: when frames are
    dropped, ``frames_indices`` names those that stay. A recipe without ``frames`` methods returns the processor itself.

    Raises
    ------
    MmaccelError
        If the recipe is not valid or a ``frames`` budget is a count; and from the processor, if a file is missing or
        broken, or pixels are normalised already.

    Examples
    --------
    >>> small = prepare(processor, "resize", retain=0.25)
    >>> model = accelerate_vlm(model, "resize", retain=0.25, processor=small)
    >>> model.mmaccel.remove()
    """
    base = getattr(processor, "_mmaccel_base", processor)
    chosen = get_recipe(recipe, retain=retain, **overrides)
    stages: Stages = tuple(
        (method, _ratio(stage.retain, method)) for stage, method in chosen.build() if isinstance(method, FramesMethod)
    )
    if not stages:
        return base
    if not callable(base) or not any(
        hasattr(base, name) for name in ("image_processor", "video_processor", "fetch_images", "fetch_videos")
    ):
        raise MmaccelError(f"{type(base).__name__} reads no pictures; give the model's processor (AutoProcessor).")
    prepared = _shadow(base, chosen, {"__call__": _call(type(base), stages), **_video_hooks(type(base), stages)})
    inner = getattr(base, "video_processor", None)
    if inner is not None:
        prepared.video_processor = _shadow(inner, chosen, _video_hooks(type(inner), stages))
    return prepared


def _ratio(retain: float | None, method: FramesMethod) -> float:
    if retain is None:
        return 1.0
    if isinstance(retain, int):
        raise MmaccelError(
            f"{method.name} works on pixels, before there are tokens to count; give a ratio such as retain=0.25, "
            f"not {retain}."
        )
    return retain


def _shadow(base: Any, recipe: Recipe, overrides: dict[str, Any]) -> Any:
    """A shallow copy of ``base`` whose class is a subclass with ``overrides`` and the same name."""
    cls = type(base)
    members = {
        **overrides,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": lambda self: (prepare, (base, recipe)),
        "_mmaccel_base": base,
        "mmaccel_recipe": recipe,
    }
    shadow = copy.copy(base)
    shadow.__class__ = type(cls.__name__, (cls,), members)
    return shadow


def _call(cls: Any, stages: Stages) -> Callable[..., Any]:
    """``__call__`` of a prepared processor of class ``cls``."""
    original = cls.__call__
    signature = inspect.signature(original)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        extra = bound.arguments.get("kwargs", {})
        resizing = next((method.name for method, _ in stages if not method.only_chooses), None)
        if resizing and any(
            given.get("do_resize") is False
            for given in (extra, extra.get("images_kwargs", {}), extra.get("videos_kwargs", {}))
        ):
            raise UnsupportedError(
                f"{resizing} changes the size of pictures, and with do_resize=False the processor takes them as they are; "
                "leave out do_resize, or take a recipe that works behind the processor."
            )
        for given in (bound.arguments, extra):
            if given.get("images") is not None:
                given["images"] = _pictures(given["images"], stages)
            if given.get("videos") is not None:
                given["videos"] = _clips(given["videos"])
        return original(*bound.args, **bound.kwargs)

    return call


# ------------------------------------------------------------------------------------------------------------ pictures


def _pictures(images: Any, stages: Stages) -> Any:
    """Reduce every picture of a nested list; lists keep their shape, arrays and tensors their layout."""
    if isinstance(images, (list, tuple)):
        return [_pictures(image, stages) for image in images]
    if isinstance(images, (np.ndarray, torch.Tensor)) and images.ndim >= 4:
        return [_pictures(image, stages) for image in images]
    if isinstance(images, (np.ndarray, torch.Tensor)):
        # transformers takes no picture without channels
        bytes_, back = _as_frames((images[..., None] if images.ndim == 2 else images)[None])
        small = np.array(_reduced(load_picture(bytes_[0]), stages))
        return back(small[None])[0]
    return _reduced(load_picture(images), stages)


def _reduced(image: PILImage, stages: Stages) -> PILImage:
    for method, retain in stages:
        image = method.picture(image, retain)
        if not isinstance(image, PILImage):
            refuse(method, "picture()", described(image), "a PIL picture")
    return image


# --------------------------------------------------------------------------------------------------------------- clips


def _clips(videos: Any) -> Any:
    """A nested list of clips: paths as strings of files that exist, and frames that are PIL pictures as RGB."""
    if isinstance(videos, (list, tuple)):
        return [_clips(video) for video in videos]
    if isinstance(videos, PILImage):
        return load_picture(videos)
    if not isinstance(videos, (str, os.PathLike)):
        return videos
    text = os.fspath(videos)
    if not text.startswith(("http://", "https://")) and not os.path.isfile(text):
        raise MmaccelError(f"The video {text!r} does not exist; give the path of a video file.")
    return text


def _video_hooks(cls: type, stages: Stages) -> dict[str, Any]:
    """Overrides of a prepared video processor; empty for other processors."""
    if not hasattr(cls, "fetch_videos"):
        return {}
    if not hasattr(cls, "_decode_and_sample_videos"):
        raise UnsupportedError(f"{cls.__name__} has no step after frame sampling; run: {remedy()}")
    decode_and_sample, fetch = cls._decode_and_sample_videos, cls.fetch_videos

    def sampled(self: Any, videos: Any, video_metadata: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], list[Any]]:
        # transformers writes into the metadata that it is given
        clips, about = decode_and_sample(self, videos, copy.deepcopy(video_metadata), *args, **kwargs)
        pairs = [_clip(clip, metadata, stages) for clip, metadata in zip(clips, about, strict=True)]
        return [clip for clip, _ in pairs], [metadata for _, metadata in pairs]

    def fetch_videos(self: Any, video_url_or_urls: Any, sample_indices_fn: Any = None) -> Any:
        if isinstance(video_url_or_urls, (list, tuple)):
            return list(zip(*[fetch_videos(self, one, sample_indices_fn) for one in video_url_or_urls], strict=True))
        if not video_url_or_urls.startswith(("http://", "https://")):
            return decode_sampled(video_url_or_urls, sample_indices_fn)
        from transformers.utils import is_av_available, is_decord_available, is_torchcodec_available
        from transformers.video_utils import load_video

        backend = "pyav" if is_av_available() else "decord" if is_decord_available() else None
        try:
            if is_torchcodec_available() or backend is None:
                return fetch(self, video_url_or_urls, sample_indices_fn=sample_indices_fn)
            return load_video(video_url_or_urls, backend=backend, sample_indices_fn=sample_indices_fn)
        except Exception as error:
            raise MmaccelError(f"The video {video_url_or_urls!r} cannot be read: {first_line(error)}") from error

    return {"_decode_and_sample_videos": sampled, "fetch_videos": fetch_videos}


def _clip(clip: Any, metadata: Any, stages: Stages) -> tuple[Any, Any]:
    """One clip, ``[T, H, W, C]`` or ``[T, C, H, W]`` array or tensor, reduced, and its metadata for the frames that stay."""
    frames, back = _as_frames(clip)
    # methods see RGB
    grey = frames.shape[-1] == 1
    frames = np.repeat(frames, 3, axis=-1) if grey else on_white(frames)
    indices = getattr(metadata, "frames_indices", None)
    indices = np.arange(len(frames)) if indices is None else np.asarray(indices)
    for method, retain in stages:
        stay = check_frames(method, "choose()", method.choose(frames, retain), len(frames))
        frames = frames[stay] if method.only_chooses else _shown(method, frames, retain)
        if len(stay) != len(frames):
            raise MmaccelError(
                f"Method {method.name!r} made {len(frames)} frames but says that it keeps {len(stay)}; its choose() must "
                "name the frames that clip() shows."
            )
        indices = indices[stay]
    if dataclasses.is_dataclass(metadata) and not isinstance(metadata, type):
        metadata = dataclasses.replace(metadata, **{"frames_indices": indices.tolist()})
    return back(frames[..., :1] if grey else frames), metadata


def _shown(method: FramesMethod, frames: np.ndarray, retain: float) -> np.ndarray:
    """The frames ``[T', H, W, 3]`` uint8 with which a method replaces ``frames``."""
    clip = method.clip(frames, retain)
    if not isinstance(clip, np.ndarray) or clip.ndim != 4 or clip.shape[3] != 3 or clip.dtype != np.uint8:
        refuse(method, "clip()", described(clip), "a uint8 array of shape (frames, height, width, 3)")
    return clip


def _as_frames(pixels: Any) -> tuple[np.ndarray, Callable[[np.ndarray], Any]]:
    """``[T, H, W, C]`` uint8 of an array or tensor in any layout and range, and the way back to its layout.

    ``[T, H, W]`` is grey. Floating point pixels get their range back, and lose what is finer than 1/255; integers stay uint8.
    """
    if isinstance(pixels, torch.Tensor):
        pixels = pixels.detach()
        # numpy has no bfloat16
        array = (pixels.float() if pixels.is_floating_point() else pixels).cpu().numpy()
    else:
        array = np.asarray(pixels)
    grey = array.ndim == 3
    first = not grey and array.shape[-1] not in (1, 3, 4) and array.shape[1] in (1, 3, 4)
    if not grey and not first and array.shape[-1] not in (1, 3, 4):
        raise MmaccelError(f"Pixels of shape {tuple(array.shape[1:])} have no channel dimension of 1, 3 or 4.")
    frames = array[..., None] if grey else array.transpose(0, 2, 3, 1) if first else array
    frames, white = to_bytes(frames, "A picture or clip")
    floating = np.issubdtype(array.dtype, np.floating)

    def back(frames: np.ndarray) -> Any:
        result = frames[..., 0] if grey else frames.transpose(0, 3, 1, 2) if first else frames
        if floating:
            result = (result.astype(np.float32) * (white / 255)).astype(array.dtype)
        if isinstance(pixels, torch.Tensor):
            tensor = torch.from_numpy(np.ascontiguousarray(result)).to(pixels.device)
            return tensor.to(pixels.dtype) if floating else tensor
        return result

    return np.ascontiguousarray(frames), back


__all__ = ["load_picture", "prepare"]
