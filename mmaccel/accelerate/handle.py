"""Base of the handles of accelerated models and encoders: installs hooks and removes them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

from ..errors import MmaccelError, UnsupportedError
from ..recipe import Recipe
from ..runtime.call.attention_patch import AttentionKind, AttentionPatch
from ..runtime.call.plan import Plan

M = TypeVar("M", bound=nn.Module)
logger = logging.getLogger("mmaccel")


class Handle:
    """Base of the handle ``model.mmaccel``.

    Everything hangs on one instance: hooks on its modules, wrapped methods in its ``__dict__``, and the config that its
    attention modules see. Nothing is patched on a class, and the model's own config stays as it was.

    plan : what is done with the model in every call, with the recipe, and the stages as fitted to the model.
    """

    #: what the user accelerated, in messages
    what: ClassVar[str]
    plan: Plan

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._restore: list[Callable[[], None]] = []
        self._attention_patches: list[AttentionPatch] = []

    @property
    def recipe(self) -> Recipe:
        """The active recipe."""
        return self.plan.recipe

    def __repr__(self) -> str:
        """One line with the model and its recipe, which the log shows too."""
        return f"<mmaccel on {self.plan.towers.name}: {self.recipe}>"

    def again(self) -> Self:
        """Accelerate the model again in the same way, after :meth:`remove`."""
        raise NotImplementedError

    def remove(self) -> None:
        """Restore the model: hooks, methods, attention implementation, this handle."""
        for undo in reversed(self._restore):
            undo()
        self._restore.clear()
        self._attention_patches.clear()

    @classmethod
    def on(cls, model: Any) -> Self | None:
        """The active handle of ``model``; None on a bare model. Raises UnsupportedError if ``model`` is a shallow copy of an
        accelerated model, which shares its modules."""
        handle = getattr(model, "mmaccel", None)
        if not isinstance(handle, cls) or not handle.attached:
            return None
        if handle._model is not model:
            raise UnsupportedError(
                "This model is a shallow copy of an accelerated one and shares its modules; call model.mmaccel.remove() first."
            )
        return handle

    @property
    def attached(self) -> bool:
        """Whether the handle is active: :meth:`remove` was not called."""
        return bool(self._restore)

    def check_attached(self) -> None:
        """Raise if something that was installed is missing; called before every forward."""
        for patch in self._attention_patches:
            patch.check()

    def __reduce__(self) -> Any:
        # a copied or unpickled model would go on calling what was put on the one it came from
        raise UnsupportedError(
            f"An accelerated {self.what} cannot be copied or pickled; call model.mmaccel.remove() first."
        )

    def _install(self) -> None:
        """Install everything on the model, or nothing."""
        try:
            self._attach()
            self._model.__dict__["mmaccel"] = self
            self._restore.append(functools.partial(self._model.__dict__.pop, "mmaccel", None))
        except BaseException:
            self.remove()
            raise
        self._log()

    def _log(self) -> None:
        """Log the fitted stages with their sites and budgets, and notes."""
        plan, recipe = self.plan, self.recipe
        logger.info("%s", self)
        for stage in plan.stages:
            method = stage.method
            budget = "its own" if stage.retain is None else stage.retain
            logger.info("stage %d at site %s: %r, budget %s", stage.number, method.site, method, budget)
        logger.info("positions=%r, variant=%r, kernels=%r", recipe.positions, recipe.variant, plan.kernels)
        for note in plan.notes:
            logger.info("%s", note)

    def _attach(self) -> None:
        raise NotImplementedError

    def _hook(self, *handles: Any) -> None:
        self._restore.extend(handle.remove for handle in handles)

    def _set(self, target: Any, name: str, value: Any) -> None:
        """Shadow an attribute of an instance; undone by :meth:`remove`."""
        had, before = name in target.__dict__, target.__dict__.get(name)
        target.__dict__[name] = value

        def undo() -> None:
            if had:
                target.__dict__[name] = before
            else:
                target.__dict__.pop(name, None)

        self._restore.append(undo)

    def _wrap(self, target: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._set(target, name, make(getattr(target, name)))

    def _patch_attention(self, root: nn.Module, kind: AttentionKind) -> None:
        patch = AttentionPatch(root, kind)
        self._attention_patches.append(patch)
        self._restore.append(patch.off)

    def _set_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``set_attn_implementation``: the user's choice goes below our attention function, and stays after
        :meth:`remove`."""

        @functools.wraps(original)
        def set_attn_implementation(*args: Any, **kwargs: Any) -> Any:
            before = [pair for patch in self._attention_patches for pair in patch.bases()]
            for patch in self._attention_patches:
                patch.off()
            try:
                result = original(*args, **kwargs)
                for patch in self._attention_patches:
                    patch.check_backend()
                return result
            except BaseException:
                for config, base in before:
                    config._attn_implementation_internal = base
                raise
            finally:
                for patch in self._attention_patches:
                    patch.on()

        return set_attn_implementation


def check_model(model: Any) -> None:
    """Raise :class:`MmaccelError` unless this is a model, and not the name or a pipeline of one."""
    if isinstance(model, nn.Module):
        return
    what = f"The name {str(model)!r}" if isinstance(model, (str, Path)) else f"A {type(model).__name__}"
    inside = isinstance(getattr(model, "model", None), nn.Module)
    remedy = "give its .model" if inside else "give what from_pretrained has loaded"
    raise MmaccelError(f"{what} is not a model; {remedy}.")


def exchange(previous: Handle | None, make: Callable[[], object]) -> None:
    """Replace the handle ``previous`` by what ``make`` installs; if that fails, install the previous one again."""
    if previous is not None:
        previous.remove()
    try:
        make()
    except BaseException:
        if previous is not None:
            previous.again()
        raise


@contextmanager
def restored(put: Callable[[], M], on: Callable[[], Handle | None]) -> Iterator[M]:
    """Context manager with what ``put`` returns; on exit it restores the handle that ``on`` returned before."""
    previous = on()
    try:
        yield put()
    finally:
        if (handle := on()) is not previous:
            if handle is not None:
                handle.remove()
            if previous is not None:
                previous.again()
