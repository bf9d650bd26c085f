"""Every error a user can cause: one sentence that names the thing and the remedy."""


class MmaccelError(ValueError):
    """A recipe, budget, input or model that mmaccel cannot honour."""


class UnsupportedError(MmaccelError):
    """The model, the family or the way it is called lacks something that the recipe needs."""
