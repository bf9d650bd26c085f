"""transformers' own server with a recipe.

    python examples/transformers_serve.py Qwen/Qwen2.5-VL-3B-Instruct divprune 0.25

Every model that ``transformers serve`` loads is accelerated, with one recipe and one budget for all requests. It loads whatever
address or file a client names and has no limits, so keep it for yourself; ``mmaccel serve`` has budgets by request, limits, a
queue and metrics. Needs ``pip install 'transformers[serving]'``.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager

from mmaccel import accelerate_vlm, is_accelerated, prepare


def start(model: str, recipe: str, retain: float | None = None, **options: Any) -> Serve:
    """``transformers serve MODEL`` with a recipe; ``options`` are those of that command."""

    class Accelerated(model_manager.ModelManager):
        """Loads as before, and puts the recipe on."""

        def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            loaded, processor = super().load_model_and_processor(*args, **kwargs)
            processor = prepare(processor, recipe, retain=retain)
            if not is_accelerated(loaded):
                accelerate_vlm(loaded, recipe, retain=retain, processor=processor)
            return loaded, processor

    before = model_manager.ModelManager
    # the command takes the class from there when it starts
    model_manager.ModelManager = Accelerated
    try:
        return Serve(model, **options)
    finally:
        model_manager.ModelManager = before


if __name__ == "__main__":
    start(sys.argv[1], sys.argv[2], float(sys.argv[3]) if sys.argv[3:] else None)
