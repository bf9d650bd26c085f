"""Measure the heads of a model, for policies that treat heads by what they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..accelerate import is_accelerated
from ..core.files import locked, write_whole
from ..errors import MmaccelError
from ..families import Family, family_of
from ..kv.policies.duoattention import reach_back
from ..kv.policies.qfilter import main_direction
from ..kv.policies.razorattention import repetition_scores
from ..kv.scoring.importance import by_group
from ..method import LayerAttention
from ..method.calibration import Calibration
from ..method.selector import ModelFingerprint
from ..runtime.call.attention_patch import AttentionKind, AttentionPatch, base_function
from .bench import provenance
from .evaluate import Question, inputs_of
from .resume import check_settings, naming_files, run_settings, shown, usable

#: called with the number of a layer of the cache, its queries ``[B, Hq, S, D]`` and keys ``[B, Hkv, S, D]`` behind RoPE, the
#: factor of their products, and how far back its window reaches
Watch = Callable[[int, Tensor, Tensor, float, int | None], None]
_watch: ContextVar[tuple[Family, Watch] | None] = ContextVar("watch", default=None)


def calibrate(
    model: Any,
    processor: Any,
    questions: Sequence[Question],
    *,
    out: str | Path,
    period: int = 256,
    repeats: int = 4,
    seed: int = 0,
    complain: Callable[[str], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Measure every KV head of a bare model and write the figures to a file.

    ``echo`` and ``induction`` (:class:`~mmaccel.kv.policies.razorattention.RazorAttention`) are measured on random tokens
    that are repeated. ``gates`` (:class:`~mmaccel.kv.policies.duoattention.DuoAttention`) and ``filters``
    (:class:`~mmaccel.kv.policies.qfilter.QFilter`) are measured on the prompts of ``questions``, which are read and not
    answered.

    Parameters
    ----------
    model, processor : as for :func:`mmaccel.accelerate_vlm`; the model must be bare. It is not changed.
    questions : of :func:`mmaccel.programs.evaluate.ask_samples` and the like, at least one.
    out : the file, ``calibration.safetensors`` by convention. ``OUT.part`` beside it holds what was measured so far, so that a
        call with the same settings resumes; it is deleted in the end.
    period, repeats : int, random tokens, at least 2, and how many times they are repeated, at least 2.
    seed : int, of the random tokens.
    complain : called with one sentence for every question that cannot be used and is left out. Without it, that is an error.
    progress : called with the name of a part of the work, how much of it is done, and how much there is.

    Raises
    ------
    MmaccelError
        If a number is out of range, no question can be used, the model is accelerated, ``OUT.part`` belongs to a run with other
        settings or is damaged, or another run writes to it.
    """
    out, tell = Path(out), progress or (lambda what, done, of: None)
    for name, value in (("period", period), ("repeats", repeats)):
        if value < 2:
            raise MmaccelError(f"`{name}` must be at least 2, got {value}.")
    if is_accelerated(model):
        raise MmaccelError(
            "The model is accelerated, and calibrate measures bare ones; call model.mmaccel.remove() first."
        )
    part, other = out.with_name(f"{out.name}.part"), "delete it, or give another file with --out (out=)"
    with ExitStack() as stack:
        stack.enter_context(naming_files(other))
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = out.with_name(f"{out.name}.lock")
        stack.enter_context(locked(lock, str(out), "give another file with --out (out=)"))
        stack.callback(lock.unlink, missing_ok=True)
        taken = usable(processor, questions, complain)
        if not taken:
            raise MmaccelError("No question can be used; give some with --data or --suite (questions=).")
        settings = {**run_settings(model, processor, taken), "period": period, "repeats": repeats, "seed": seed}
        family = family_of(model, processor)
        sums = _Sums(family)
        done = sums.resume(part, settings, other)
        stack.enter_context(_watched(family))
        stack.enter_context(torch.no_grad())
        for number in range(done, 1 + len(taken)):
            tell("measuring heads", number, 1 + len(taken))
            if number == 0:
                ids = random_tokens(family, processor, period, repeats, seed)
                sums.repetition(ids, period, ids.shape[1] - period * repeats)
            else:
                question = taken[number - 1]
                sums.prompt(inputs_of(model, processor, [(question, question.load())]))
            sums.save(part, settings, number + 1)
        tell("measuring heads", 1 + len(taken), 1 + len(taken))
        record = {"date": provenance.today(), "prompts": len(taken), "settings": shown(settings)}
        made = Calibration(ModelFingerprint.of(family), sums.figures(), record)
        made.save(out)
        part.unlink(missing_ok=True)
    return made


def random_tokens(family: Family, processor: Any, period: int, repeats: int, seed: int) -> Tensor:
    """``[1, period * repeats]`` ids of words, with the begin token in front where the tokenizer has one."""
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = torch.arange(family.text.config.vocab_size)[: len(tokenizer)]
    usual = ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids)) & ~family.visual(ids[None])[0]
    words = ids[usual]
    random = torch.Generator().manual_seed(seed)
    # without repetition, as long as there are enough
    order = torch.cat([torch.randperm(len(words), generator=random) for _ in range(1 + period // len(words))])
    repeated = words[order[:period]].repeat(repeats)
    begin = tokenizer.bos_token_id
    return torch.cat([torch.tensor([] if begin is None else [begin], dtype=torch.long), repeated])[None]


class _Sums:
    """Sums of figures over what was measured, by ``NAME.LAYER`` of the cache; float64."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.by_name: dict[str, Tensor] = {}

    def add(self, name: str, layer: int, value: Tensor) -> None:
        key, value = f"{name}.{layer}", value.double().cpu()
        self.by_name[key] = self.by_name.get(key, torch.zeros_like(value)) + value

    # --- measuring ------------------------------------------------------------------------------------------------
    def repetition(self, ids: Tensor, period: int, begin: int) -> None:
        """Random tokens ``ids [1, S]`` that are repeated behind the first ``begin``."""

        def watch(layer: int, query: Tensor, key: Tensor, scaling: float, window: int | None) -> None:
            at = torch.arange(key.shape[2], device=key.device)
            back = at[:, None] - at
            visible = None if window is None else ((back >= 0) & (back < window))[None, None]
            attention = LayerAttention(query, key, visible, scaling, torch.ones_like(at, dtype=torch.bool)[None])
            for name, scores in zip(("echo", "induction"), repetition_scores(attention, period, begin), strict=True):
                self.add(name, layer, by_group(scores[None, :, None], key.shape[1], "max")[0, :, 0])

        self._read({"input_ids": ids.to(self.family.model.device)}, watch)

    def prompt(self, inputs: dict[str, Any]) -> None:
        """The prompt of one question: once as it is, and once with its mean query and key at every position."""
        means: dict[Any, Tensor] = {}

        def note(layer: int, query: Tensor, key: Tensor, scaling: float, window: int | None) -> None:
            heads = key.shape[1]
            queries = query[0].float().unflatten(0, (heads, -1)).flatten(1, 2)
            self.add("products", layer, queries.mT @ queries)
            self.add("total", layer, queries.sum(1))

        def last(layer: int, query: Tensor, key: Tensor, scaling: float, window: int | None) -> None:
            self.add("gates", layer, reach_back(query[0, :, -1], key[0], scaling, window))

        axis = 2 if self.family.heads_first else 1

        def take(module: Any, args: Any, output: Tensor) -> None:
            means[module] = output.mean(axis, keepdim=True)

        def give(module: Any, args: Any, output: Tensor) -> Tensor:
            return means[module].expand_as(output)

        modules = []
        for attention in map(self.family.attention_in, self.family.attending):
            modules += [self.family.queries_in(attention), self.family.keys_in(attention)]
        for hook, watch in ((take, note), (give, last)):
            hooks = [module.register_forward_hook(hook) for module in modules]
            try:
                self._read(inputs, watch)
            finally:
                for one in hooks:
                    one.remove()

    def _read(self, inputs: dict[str, Any], watch: Watch) -> None:
        token = _watch.set((self.family, watch))
        try:
            self.family.model(**inputs, use_cache=False, logits_to_keep=1)
        finally:
            _watch.reset(token)

    def figures(self) -> dict[str, dict[int, Tensor]]:
        """Figures as policies read them, float32."""
        found: dict[str, dict[int, Tensor]] = {}
        for key, value in sorted(self.by_name.items()):
            name, layer = key.split(".")
            if name == "products":
                found.setdefault("filters", {})[int(layer)] = main_direction(
                    value, self.by_name[f"total.{layer}"]
                ).float()
            elif name != "total":
                found.setdefault(name, {})[int(layer)] = value.float()
        return found

    # --- files ----------------------------------------------------------------------------------------------------
    def save(self, path: Path, settings: dict[str, Any], done: int) -> None:
        """Write the sums of the first ``done`` pieces of work."""
        from safetensors.torch import save

        write_whole(path, save(self.by_name, {"settings": json.dumps(settings), "done": str(done)}))

    def resume(self, path: Path, settings: dict[str, Any], other: str) -> int:
        """Read the sums of an earlier run with the same settings; returns how many pieces of work they are of. ``other`` is
        what to do where that is no such file."""
        from safetensors import SafetensorError, safe_open

        if not path.exists():
            return 0
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata()
                before, done = json.loads(about["settings"]), int(about["done"])
                self.by_name = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise MmaccelError(f"{str(path)!r} is a damaged file, or not one of mmaccel calibrate; {other}.") from error
        check_settings(path, before, json.loads(json.dumps(settings)), other)
        return done


@contextmanager
def _watched(family: Family) -> Iterator[None]:
    """Show the attention of every layer of the bare language model to what :data:`_watch` holds."""
    patch = AttentionPatch(family.text, _PROBE)
    try:
        yield
    finally:
        patch.off()


def _attend(
    base: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of one layer, as transformers calls it."""
    watched, number = _watch.get(), getattr(module, "layer_idx", None)
    if watched is not None and number is not None:
        family, watch = watched
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        watch(family.stored_from(number), query, key, scale, options.get("sliding_window"))
    return base_function(base, module)(module, query, key, value, attention_mask, scaling=scaling, **options)


_PROBE = AttentionKind("probe", _attend)
