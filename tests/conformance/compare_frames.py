"""Methods that choose frames against the authors' programs; see comparators.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from comparators import Arrays, Params, close

from mmaccel.frames.scenetilling import boundaries, depths


def scenetilling(params: Params, arrays: Arrays) -> None:
    """Similarity, depth and boundaries; the program appends the last frame."""
    features = arrays["features"]
    similarity = torch.cosine_similarity(features[:-1], features[1:], dim=-1)
    close(similarity, arrays["sim"])
    depth = depths(arrays["sim"].numpy())
    close(torch.from_numpy(depth), arrays["depth"])
    found = np.append(boundaries(depth, params["k"], params["alpha"]), len(features) - 1)
    assert np.unique(found).tolist() == arrays["boundaries"].tolist()


COMPARATORS: dict[tuple[str, str], Callable[[Params, Arrays], None]] = {
    ("bigai-nlco/VideoLLaMB", "llava/model/multimodal_projector/self_segment.py:segment"): scenetilling,
}
