"""Mix-in for vLLM's processors: placeholders in the number of kept tokens."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.layout import Modality
from ...errors import MmaccelError, UnsupportedError
from ...runtime.call.vision_output import VisionOutput
from .counters import Counters
from .plan import Kept, ServingPlan
from .settings import ASKED, MODALITIES, Budget, as_integers, from_integers, request_of

_log = logging.getLogger("vllm.mmaccel")
#: the field of an item that says what stays of it: ``[4]`` int64, the budget of its request as two whole numbers, its tokens,
#: and how many stay
FIELD = "mmaccel_budget"
#: the field of an item with text between its placeholders: ``[2, n]`` int64, the tokens of the unreduced prompt in their place,
#: and 1 for those that are visual
APART = "mmaccel_apart"
#: the field of an item of which patches are left out: ``[patches]`` int64, the one that each is predicted from
SOURCES = "mmaccel_sources"
#: all of them
OURS = (FIELD, APART, SOURCES)
#: parts of ``mm_processor_kwargs`` that hold options of one processor each
_SCOPES = ("text_kwargs", "images_kwargs", "videos_kwargs", "audio_kwargs")
#: vLLM makes the table of M-RoPE so many times as long as the positions that a model was trained on
_TABLE = 4


class ReducedProcessor:
    """Mix-in in front of a processor class of vLLM; ``plan`` is set on the class made of both."""

    plan: ServingPlan
    info: Any
    counters = Counters(None)
    #: whether it was said that a count is more than a picture has
    said = False
    #: whether a prompt is processed that nobody asked
    dummy = False

    def apply(self, inputs: Any, timing_ctx: Any) -> Any:
        """Process a request, after its options are checked."""
        others = {name: value for name, value in inputs.hf_processor_mm_kwargs.items() if name not in ASKED}
        self._check_known(others)
        budgets = request_of(inputs.hf_processor_mm_kwargs)
        for modality, budget in budgets.items():
            self.plan.of(budget, modality)
        others[FIELD] = {modality: as_integers(budget) for modality, budget in budgets.items()}
        return super().apply(dataclasses.replace(inputs, hf_processor_mm_kwargs=others), timing_ctx)  # type: ignore[misc]

    def _check_known(self, processing: Mapping[str, Any]) -> None:
        """Refuse unknown options; a misspelt budget would silently be that of the server."""
        processor = self.info.get_hf_processor()
        parts = [processor, *(getattr(processor, name, None) for name in ("image_processor", "video_processor"))]
        try:
            scopes = self.info.supported_mm_processor_kwargs
        except AttributeError:
            # processors that vLLM has written itself, as for InternVL, have their options as attributes alone
            scopes = {}
        known = {*_SCOPES, *(name for names in scopes.values() for name in names)}
        for scope, given in processing.items():
            for name in (scope, *(given if scope in _SCOPES and isinstance(given, Mapping) else ())):
                if name not in known and not any(hasattr(part, str(name)) for part in parts):
                    raise MmaccelError(
                        f"Nothing reads {name!r} in mm_processor_kwargs: it is not an option of the model's processor, and "
                        'mmaccel takes {"mmaccel": {"retain": 0.1}} or {"retain": {"image": 0.5, "video": 0.1}}.'
                    )

    def _get_mm_hashes(self, inputs: Any) -> Any:
        """Cache keys of pictures, which depend on the recipe too; the budget of a request is in its key already."""
        # of those by which memory is measured no patch is left out
        said = self.plan.settings.fingerprint(), self.dummy
        kwargs = {**inputs.hf_processor_mm_kwargs, "mmaccel": said}
        return super()._get_mm_hashes(dataclasses.replace(inputs, hf_processor_mm_kwargs=kwargs))  # type: ignore[misc]

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, Any]) -> Any:
        return super()._apply_hf_processor_main(mm_items, _others(hf_kwargs))  # type: ignore[misc]

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> Any:
        return super()._get_mm_fields_config(hf_inputs, _others(hf_processor_mm_kwargs))  # type: ignore[misc]

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        updates = super()._get_prompt_updates(  # type: ignore[misc]
            mm_items, _others(hf_processor_mm_kwargs), out_mm_kwargs
        )
        asked = hf_processor_mm_kwargs[FIELD]
        # sounds are not reduced
        return [
            self._shorter(update, out_mm_kwargs, asked[update.modality]) if update.modality in asked else update
            for update in updates
        ]

    def _get_mm_prompt_updates(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_mm_prompt_updates(*args, **kwargs)  # type: ignore[misc]
        # before new pictures are in the cache of this process, from which vLLM concludes that its engine has them
        self._check_length(found)
        return found

    def _recompute_cached_prompt_update(self, cached_update: Any, new_item_idx: int) -> Any:
        """The update of an item from vLLM's cache; some processors write its number anew, and then make other details."""
        made = super()._recompute_cached_prompt_update(cached_update, new_item_idx)  # type: ignore[misc]
        vars(made.content).update({k: v for k, v in vars(cached_update.content).items() if k.startswith("mmaccel_")})
        return made

    def get_dummy_mm_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Inputs by which vLLM measures memory; they are not counted."""
        self.dummy = True
        try:
            return super().get_dummy_mm_inputs(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.dummy = False

    def _apply_prompt_updates(self, token_ids: list[int], mm_prompt_updates: Any) -> Any:
        self._check_length(mm_prompt_updates)
        for modality in () if self.dummy else MODALITIES:
            contents = [update.content for item in mm_prompt_updates.get(modality, ()) for update in item]
            self.counters.add("visual_tokens", modality, sum(one.mmaccel_before for one in contents))
            self.counters.add("visual_tokens_kept", modality, sum(one.mmaccel_kept for one in contents))
        return super()._apply_prompt_updates(token_ids, mm_prompt_updates)  # type: ignore[misc]

    def _check_length(self, mm_prompt_updates: Any) -> None:
        """Refuse a prompt whose kept positions are beyond vLLM's table of them; those of M-RoPE grow by sides of pictures."""
        if not self.plan.keeps_positions or self.plan.turns:
            return
        items = [item for modality in MODALITIES for item in mm_prompt_updates.get(modality, ())]
        contents = [update.content for item in items for update in item]
        dropped = sum(one.mmaccel_before - one.mmaccel_kept for one in contents)
        config = self.info.ctx.model_config
        most = _TABLE * int(config.hf_config.get_text_config().max_position_embeddings) - int(config.max_model_len)
        if dropped > most:
            raise MmaccelError(
                f"This prompt loses {dropped} visual tokens, and can keep its positions if it loses {most} at most; "
                f"show fewer pictures, or start a server anew: {self.plan.remedy}."
            )

    def _shorter(self, update: Any, out_mm_kwargs: Any, asked: tuple[int, int]) -> Any:
        """The update of a prompt with the placeholders that stay; writes :data:`FIELD` into the items."""
        from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem
        from vllm.multimodal.processing import PromptUpdateDetails

        budget = from_integers(*asked)

        def content(number: int) -> Any:
            found = update.content(number) if callable(update.content) else update.content
            details = found if isinstance(found, PromptUpdateDetails) else PromptUpdateDetails.from_seq(found)
            item = out_mm_kwargs[update.modality][number]
            full = torch.tensor(details.full)
            every = torch.ones_like(full, dtype=torch.bool)
            visual = every if details.is_embed is None else details.is_embed(details.full)
            before = int(visual.sum())
            kept = self._kept(update.modality, item, before, budget)
            total = kept.total
            data = torch.tensor([*asked, before, total])
            item[FIELD] = MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=True))
            opaque, stays = self._apart(update.modality, visual), ~visual | (visual.cumsum(0) <= total)
            if opaque and self.info.ctx.model_config.is_mm_prefix_lm:
                opaque, stays = False, self._run_by_run(update.modality, visual, kept)
            if opaque:
                inside, token = self._inside(visual), self.plan.placeholder(update.modality)
                apart = torch.stack([full[inside], visual[inside].long()])
                item[APART] = MultiModalFieldElem(data=apart, field=MultiModalBatchedField(keep_on_cpu=True))
                left = [token] * (apart.shape[1] - before + total)
                tokens = [*full[: inside.start].tolist(), *left, *full[inside.stop :].tolist()]
                shorter = PromptUpdateDetails.select_token_id(tokens, token)
            else:
                shorter = PromptUpdateDetails(full[stays].tolist(), details.is_embed)
            shorter.mmaccel_before, shorter.mmaccel_kept = before, total
            return shorter

        return dataclasses.replace(update, replacement=content)

    def _apart(self, modality: Modality, visual: torch.Tensor) -> bool:
        """Whether an item becomes placeholders, and the text between them comes with what is encoded.

        So it is where text stands between placeholders, behind rows of a picture or between frames of a clip: how many tokens
        stay on either side of it is known only when the item is encoded. Clips of one frame are as those of several.
        """
        places = visual.nonzero()[:, 0]
        between = int(places[-1] - places[0]) + 1 != len(places)
        return self.plan.reduces and (between or (modality == "video" and not bool(visual.all())))

    def _inside(self, visual: torch.Tensor) -> slice:
        """The part of an item that becomes placeholders.

        From its first to its last visual token: text in front may say the number of a picture, which differs between requests.
        With M-RoPE the whole item: vLLM finds frames by the marks in front of them.

        visual : ``[n]`` bool.
        """
        if self.plan.turns:
            return slice(0, len(visual))
        places = visual.nonzero()[:, 0]
        return slice(int(places[0]), int(places[-1]) + 1)

    def _run_by_run(self, modality: Modality, visual: torch.Tensor, kept: Kept) -> torch.Tensor:
        """``[n]`` bool: the tokens that stay of an item with text between its runs of placeholders, where those of a run attend
        to each other both ways; text in their range would do so too.

        visual : ``[n]`` bool.
        """
        begins = visual & ~torch.cat([visual.new_zeros(1), visual[:-1]])
        run = begins.cumsum(0)[visual] - 1
        lengths = run.bincount()
        if kept.segments is None or len(kept.segments) != len(lengths):
            raise UnsupportedError(
                f"This {modality} has text between its tokens, which attend to each other both ways, and recipe "
                f"{self.plan.settings.recipe.name!r} decides how many stay of each run when they are encoded; keep all of them "
                f'by {{"retain": {{"{modality}": 1.0}}}}, start the server with recipe "uniform" or "pool", or send a picture '
                "with do_pan_and_scan=False."
            )
        stays = ~visual
        place = torch.arange(len(run)) - (lengths.cumsum(0) - lengths)[run]
        stays[visual] = place < torch.tensor(kept.segments)[run]
        return stays

    def _kept(self, modality: Modality, item: Any, before: int, budget: Budget) -> Kept:
        """Numbers of kept tokens of an item with ``before`` tokens."""
        if any(name.endswith("_embeds") for name in item):
            raise UnsupportedError(
                "This server reduces pictures and clips as it encodes them, and cannot take embeddings of them; send pixels."
            )
        arguments = {name: _alone(element.data) for name, element in item.items() if name not in OURS}
        (picture,) = self.plan.pictures(modality, arguments, before)
        encoded = VisionOutput(arguments, before)
        if self.plan.plan.patches is not None:
            self._leave_out(modality, item, budget, encoded)
        kept = self.plan.count(modality, picture, budget, encoded)
        if kept.notes and not self.said:
            self.said = True
            _log.warning("%s. This is said once.", "; ".join(kept.notes))
        return kept

    def _leave_out(self, modality: Modality, item: Any, budget: Budget, encoded: VisionOutput) -> None:
        """Decide which patches of an item are left out, and write that into :data:`SOURCES`."""
        from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem

        pixels = encoded.arguments[self.plan.architecture.pixels[modality]]
        sources = self.plan.predicted(encoded, self._normalised(pixels))
        if self.dummy or budget is False:
            # vLLM measures memory by pictures of one colour
            sources = torch.arange(len(sources))
        item[SOURCES] = MultiModalFieldElem(data=sources, field=MultiModalBatchedField(keep_on_cpu=True))
        self.plan.leave_out(encoded, [sources])

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels as the tower is given them; vLLM may leave it to the device to normalise them."""
        config = self.info.ctx.model_config
        if pixels.dtype == torch.uint8:
            from vllm.model_executor.layers.fusion.mm_input_norm import _load_norm_params

            known = _load_norm_params(config)
            # as processors of transformers compute it
            mean, std = (torch.tensor(x) * (1.0 / known.rescale_factor) for x in (known.image_mean, known.image_std))
            colours = pixels.float().unflatten(-1, (len(mean), -1))
            pixels = ((colours - mean[:, None]) / std[:, None]).flatten(-2)
        return pixels.to(config.dtype).float()


def _others(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a request for the processor of transformers."""
    return {name: value for name, value in kwargs.items() if name != FIELD}


def _alone(data: Any) -> Any:
    """The field of an item as that of a batch of one."""
    return data[None] if isinstance(data, torch.Tensor) else [data]
