"""Base of cache policies, their input and their shared options."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..core.budget import check_age
from ..errors import MmaccelError, UnsupportedError
from .base import Method, ModelFacts, check_layers_alone
from .layers import LayerAttention, Layerwise
from .registry import get_method


@dataclass(frozen=True)
class KeyBatch(Layerwise):
    """The keys of one layer, or of several as rows of one batch, at the end of prefill or while decoding, post-RoPE.

    While decoding, where heads store different keys, every (row, KV head) is a row of its own.

    keys, values : ``[B, Hkv, K, D]``.
    queries : ``[B, Hq, W, D]``, the last ``W = min(window, new tokens)`` queries; while decoding the most recent ones.
    places : ``[B, W]`` long, the places of the queries, -1 for padding; by default those of the last keys.
    valid : ``[B, K]`` bool, False for padding, which is on the left and always evicted first.
    visual : ``[B, K]`` bool.
    index : ``[B, K]`` long, the place of each key in the unreduced, padded sequence; ascending.
    scaling : the factor of ``q . k`` in attention.
    received : ``[B, Hkv, K]`` float32, what the policy's :meth:`Policy.observe` returned; None if it observes nothing.
    count : ``[B]`` long, how many of the competing keys stay in each row (for a prompt the mean over layers and heads).
    picture, cells : ``[B, K]`` and ``[B, K, 3]`` long, the picture or clip of a visual key and its (t, row, column); -1 for
        text, and for visual keys without a cell (newlines).
    survivors : ``[B, K]`` bool, keys whose tokens reach the last layer; None unless the policy is ``deferred``.
    expected : mean ``[B, Hq, D]`` and covariance ``[B, Hq, D, D]``, float32, of future queries, assuming that they are
        distributed like those of the prompt; None unless the policy sets ``future``.
    outgoing : ``[B, Hkv, K]`` float32, the L1 norm of each value after the layer's output projection, mean over the query
        heads of its key head; None unless the policy ``needs_outgoing``.
    ordinal : ``[B, K]`` long, the number of each key among the tokens of its row; the same as ``index``, without the padding
        between two turns. None unless the policy ``needs_ordinals``, and where there is no such padding.
    layer, depth : the number of this layer, -1 for several at once; how many layers there are.
    decoding : whether this is a decode step rather than the end of a prompt.
    answer : ``[B]`` long, while decoding the place at which the answer begins; None at the end of a prompt, and unless the
        policy ``needs_age``.
    unrotated : ``[B, Hkv, K, D]``, the keys before RoPE; None unless the policy ``needs_unrotated``.
    written : how many of the last keys and queries are those of a text behind the prompt, which is not stored.
    separator : ``[B, K]`` bool, text that separates parts of a prompt; None unless the policy ``needs_separators``, and where
        no tokenizer says what that is.
    merged : ``[B, Hkv, K]`` float32, while decoding the number of tokens that were merged into each key, 0 for others; None
        where there is none.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    valid: Tensor
    visual: Tensor
    index: Tensor
    scaling: float
    places: Tensor = None  # type: ignore[assignment]
    received: Tensor | None = None
    count: Tensor | None = None
    picture: Tensor | None = None
    cells: Tensor | None = None
    survivors: Tensor | None = None
    expected: tuple[Tensor, Tensor] | None = None
    outgoing: Tensor | None = None
    ordinal: Tensor | None = None
    layer: int = 0
    depth: int = 1
    decoding: bool = False
    answer: Tensor | None = None
    unrotated: Tensor | None = None
    written: int = 0
    separator: Tensor | None = None
    merged: Tensor | None = None

    @property
    def _tokens(self) -> Hashable:
        return self.index

    def __post_init__(self) -> None:
        if self.places is None:
            first = self.index.shape[1] - self.queries.shape[2]
            own = self.index[:, first:].masked_fill(~self.valid[:, first:], -1)
            object.__setattr__(self, "places", own)


#: the choices of the options of a cache stage that take a name, with the default of the number after the colon
CHOICES: Mapping[str, Mapping[str, float | None]] = {
    "layer_budget": {
        "uniform": None,
        "pyramid": 20.0,
        "kvpress": 20.0,
        "sparsity": 0.0,
        "entropy": None,
        "prefix": None,
        "variance": None,
        "squeeze": 0.35,
        "global": None,
    },
    "head_budget": {"uniform": None, "adaptive": 0.2, "concentrated": 0.2, "safeguard": 0.2},
    "compact": {
        "evict": None,
        "pivot": None,
        "weighted": None,
        "average": None,
        "nearest": None,
        "ema": 0.5,
        "blend": None,
        "values": 0.0,
        "residual": 1.0,
    },
    "eviction_error": {"none": None, "exact": None, "fast": None},
    "budget_in": {"keys": None, "bytes": None},
    "rest": dict.fromkeys(
        (
            "evict",
            "int2",
            "int4",
            "int8",
            "turbo2",
            "turbo3",
            "turbo4",
            "smooth2",
            "smooth4",
            "smooth8",
            "balance2",
            "balance3",
            "balance4",
            "zip2",
            "zip4",
            "fp8",
        )
    ),
    "protect": {"separators": None, "question": None},
}

#: the codecs of ``rest``
_REST = {"int": "kivi", "turbo": "turboquant", "smooth": "qserve", "balance": "qserve", "zip": "zipcache-codec"}

#: the range of that number where it is not a share, from 0 to 1
LIMITS: Mapping[str, tuple[float, float]] = {"pyramid": (0.5, 1e6), "kvpress": (0.5, 1e6), "residual": (1, 64)}


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Method):
    """Options of all cache policies; the base implements them.

    Parameters
    ----------
    layer_budget : how the budget is distributed over layers, whose mean is ``retain``. ``uniform``; ``pyramid:20``
        (PyramidKV: an arithmetic progression in which the last layer gets a 20th of the mean); ``kvpress:20`` (the same as
        kvpress has it: the window is left out, and all layers get the same where the last one had less than that);
        ``sparsity`` (VL-Cache: more for layers in which the attention of the text after the pictures is less sparse;
        ``sparsity:0.8`` distributes 80 % uniformly and the rest like that); ``entropy`` (MEDA: more for layers whose attention
        is spread more evenly); ``prefix`` (PrefixKV: every layer keeps the same share of its summed scores); ``variance``
        (D2O: more for layers whose scores vary less); ``squeeze:0.35`` (SqueezeAttention: .35 of the mean for layers whose
        attention hardly turns the hidden state, and what that leaves for the others); ``global`` (KVzip: the best scores of all
        layers and heads stay, none may be left in a layer). All but the first three are known only at the end of the forward.
    head_budget : how a layer's budget is distributed over its KV heads. ``uniform``; ``adaptive:0.2`` (AdaKV: heads compete
        for the budget, of which 20 % is distributed uniformly); ``concentrated:0.2`` (the same, with more weight for heads of
        concentrated attention); ``safeguard:0.2`` (the best 20 % of each head's share stay, and the rest compete).
    compact : how the other keys are treated. ``evict`` drops them; ``pivot``, ``weighted``, ``average`` (LOOK-M), ``ema:0.5``
        (D2O) and ``blend`` merge them into the kept key of largest cosine; ``nearest`` into the nearest in the sequence
        (Elastic Cache); ``values:0.3`` merges values alone, where that cosine is at least .3 (kvpress); ``residual:4`` merges
        all into 4 keys of every head, which are among those that stay and weigh as many as they were (ZeroMerge).
    merge_weight : the factor of the logarithm of its number of tokens that is added to the logits of a key of ``residual``, at
        least 0.
    merge_share : the share of the evicted keys, those of largest cosine, that ``compact="values"`` merges.
    eviction_error : ``exact`` ranks by the error that the output of attention has without a key (CAOTE, arXiv 2504.14051): with
        ``a`` the scores as a distribution over the keys, ``a_k / (1 - a_k) ||v_k - sum_j a_j v_j||``. ``fast`` has the mean of
        the values in place of the sum. ``none`` ranks by the scores themselves.
    every : 0 compacts at the end of prefill only; n also after every n decode steps, back to the size that prefill left. Each
        time everything stored is moved, so that a larger n costs less a step: from 16 on next to nothing. Up to n - 1 keys
        more than the budget are stored in between. The papers evict at every step (``every=1``), our recipes of them every 16,
        which kept as much of 20 descriptions by the small LLaVA and Qwen2.5-VL: the divergence was 2.79 in place of 3.49 nats
        with ``h2o-decode`` and LLaVA, and at most 0.01 more in the other cases, with a cache 2 to 8 % of the full one larger.
    cap : keys that each head of a layer may hold, over all turns, instead of what prefill left; 0 for no cap.
    growth : keys by which that limit grows with every decoded token.
    neighbours : number of neighbouring keys that stay or go together, as in ChunkKV, arXiv 2502.00299 (10 there): all have the
        mean score of their group, over heads too. A group holds keys of one picture or of text. 0 for no groups.
    sinks : number of keys at the start of the sequence that always stay.
    recent : newest keys that always stay; an int is a count, a float a share of the keys.
    protect : keys that always stay: visual keys without a cell (``separators``), text after the last picture (``question``).
    budget_in : ``keys``, or ``bytes``: ``retain`` is then the share of the bytes that the keys and values of the model would
        take. As the codec of the recipe packs them in fewer bits, so many more of them stay.
    rest : how keys are treated that do not stay at the end of a prompt. ``evict`` drops them. All others demote them: they
        are stored in few bits, and a step reads both kinds. ``int2``, ``int4``, ``int8``: keys per channel in groups of 32
        tokens, and values per token, as by ``kivi``; ``turbo2``, ``turbo3``, ``turbo4``: rotated, as by ``turboquant``;
        ``smooth2``, ``smooth4``, ``smooth8``: per token, with balanced channels of keys, as by ``qserve``; ``balance2``,
        ``balance3``, ``balance4``: the same, balanced by the queries of the prompt as well, as by MiKV; ``zip2``, ``zip4``:
        as by ``zipcache-codec``; ``fp8``. What is demoted is not quantised again and stays for good; ``retain`` says how
        many keys stay as they are.
    joint : text and visual keys share one budget, which is then ``retain`` of all keys.
    close_gaps : give the keys that stay consecutive positions, and what follows the positions behind them, as the
        ``KeyRerotationPress`` of kvpress does: keys are turned by the difference. All heads of all layers must keep as many
        keys. By default keys keep their positions.
    text_policy : the policy, by name, that ranks text keys where they have a budget (``text_retain``); by default this one.
    age : the shares of its visual tokens that a picture or clip keeps, by its age, such as ``(1.0, 0.25, 0.05, 0)`` for the
        screenshots of an agent: the newest whole, the one before it 25 %, then 5 %, all older ones none. Two or more numbers
        from 0 to 1 that never rise; ``()`` for no ages. The age of a picture is the number of newer ones in its row, of this
        prompt and of later turns. What exceeds its share is evicted at the end of a prompt with pictures, which has still read
        the pictures of earlier turns as they were. ``retain`` comes first; with 1.0 the newest picture stays whole. Text stays.
    age_step : pictures are counted in groups of this many, at least 1, which have one age, so that budgets fall only when a
        new group begins.

    ``variant="official"``: budgets are split as in the authors' programs, which do not meet them exactly: ``pyramid`` in whole
    steps, ``sparsity`` and ``entropy`` clipped and truncated, ``prefix`` by a search that stops within 5 keys, ``adaptive``
    with a truncated uniform share; bars for merging are means over heads.

    Keys that always stay are taken out of the budget first, so the budget still holds. While decoding, text keys are evicted
    only where text has a budget (``text_retain`` or ``joint``): without one a long answer outgrows ``every`` and ``cap`` once
    no visual key is left.
    """

    limits = {
        **dict.fromkeys(("every", "cap", "growth", "neighbours", "sinks"), "[0, inf)"),
        "age_step": "[1, inf)",
        "recent": "[0, inf) or [0.0, 1.0]",
        "merge_share": "(0, 1]",
        "merge_weight": "[0, inf)",
    }

    layer_budget: str = "uniform"
    head_budget: str = "uniform"
    compact: str = "evict"
    every: int = 0
    cap: int = 0
    growth: float = 0.0
    neighbours: int = 0
    sinks: int = 0
    recent: float = 0
    protect: tuple[str, ...] = ()
    eviction_error: str = "none"
    merge_share: float = 1.0
    merge_weight: float = 1.0
    budget_in: str = "keys"
    rest: str = "evict"
    joint: bool = False
    close_gaps: bool = False
    text_policy: str = ""
    age: tuple[float, ...] = ()
    age_step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.age != ():
            object.__setattr__(self, "age", check_age(self.age, f"age` of `{self.name}"))
        for option in ("layer_budget", "head_budget", "compact", "eviction_error", "budget_in", "rest"):
            self.choice(option)
        if self.rest != "evict":
            self._check_rest()
        how, number = self.choice("compact")
        if how == "residual" and number is not None and not number.is_integer():
            raise MmaccelError(f"compact={self.compact!r} must end in a whole number of keys, as 'residual:4'.")
        always = self.sinks + (self.recent if isinstance(self.recent, int) else 0)
        if 0 < self.cap < always:
            raise MmaccelError(
                f"cap={self.cap} of {self.name} is less than the keys that always stay, sinks={self.sinks} and "
                f"recent={self.recent}; give a cap of at least {always}, or fewer of these."
            )
        for kind in self.protect:
            if kind not in CHOICES["protect"]:
                raise MmaccelError(f"protect={kind!r} is unknown; it can be {' or '.join(CHOICES['protect'])}.")

    def choice(self, option: str) -> tuple[str, float | None]:
        """Name and number of an option such as ``pyramid:20``.

        Raises
        ------
        MmaccelError
            If the name is unknown or the number out of range.
        """
        name, colon, number = getattr(self, option).partition(":")
        known = CHOICES[option]
        if name not in known or (colon and known[name] is None):
            raise MmaccelError(f"{option}={getattr(self, option)!r} is unknown; it can be {', '.join(known)}.")
        try:
            value = float(number) if colon else known[name]
        except ValueError as error:
            raise MmaccelError(f"{option}={getattr(self, option)!r} must end in a number, as 'pyramid:20'.") from error
        least, most = LIMITS.get(name, (0.0, 1.0))
        # NaN is in no range
        if value is not None and not least <= value <= most:
            raise MmaccelError(
                f"{option}={getattr(self, option)!r} must end in a number from {least:g} to {most:g}, as 'pyramid:20'."
            )
        return name, value

    def _check_rest(self) -> None:
        """Refuse what evicts or merges keys that ``rest`` keeps."""
        if self.scheduled:
            raise MmaccelError(
                f"rest={self.rest!r} keeps all keys of a prompt, and every, cap and age evict some later; leave out one."
            )
        if self.compact != "evict":
            raise MmaccelError(
                f"rest={self.rest!r} keeps in few bits the keys that compact={self.compact!r} merges; leave out one."
            )
        if self.close_gaps:
            raise MmaccelError(f"rest={self.rest!r} keeps all keys, so that close_gaps finds no gaps; leave out one.")

    def rest_codec(self) -> Method | None:
        """The codec of the keys that do not stay; None where they are evicted."""
        if self.rest == "evict":
            return None
        if self.rest == "fp8":
            return get_method("fp8")()
        name, bits = self.rest[:-1], int(self.rest[-1])
        # codes of three bits fill pages of 128 tokens
        options: dict[str, Any] = {"bits": bits, "page": 128 if bits == 3 else 64, "residual": 0}
        if name == "balance":
            options["balance"] = "queries"
        return get_method(_REST[name])(**options).by("official" if self.official else "exact")

    @property
    def divides_heads(self) -> bool:
        """Whether the kept keys of a head depend on this head alone."""
        layers = self.choice("layer_budget")[0] in ("uniform", "pyramid", "kvpress")
        return layers and self.choice("head_budget")[0] == "uniform" and not self.neighbours

    @property
    def drops_lowest(self) -> bool:
        """Whether what is scored ``-inf`` is dropped though the budget would keep it."""
        return self.budget != "exact" or self.choice("layer_budget")[0] == "global"

    @property
    def scheduled(self) -> bool:
        """Whether keys are also evicted while decoding, or in later turns."""
        return self.every > 0 or self.cap > 0 or self.age != ()


class Policy(CacheOptions):
    """A method at site ``cache``: it scores keys; the base distributes the budget, keeps the best and compacts the rest."""

    site = "cache"
    excludes = {"cache": "a recipe has at most one method at site 'cache'"}
    weighable = False
    #: how many of the last queries :attr:`KeyBatch.queries` holds
    window: int = 0
    #: whether scores are the same for all heads, so that every head of a layer stores the same keys
    shared: ClassVar[bool] = False
    #: whether it scores at the end of the forward, when it is known which tokens reach the last layer
    deferred: ClassVar[bool] = False
    #: the number of future positions that :attr:`KeyBatch.expected` averages over; 0 leaves it None
    future: int = 0
    #: whether :attr:`KeyBatch.outgoing` is to be filled
    needs_outgoing: ClassVar[bool] = False
    #: whether :attr:`KeyBatch.ordinal` is to be filled
    needs_ordinals: ClassVar[bool] = False
    #: whether :attr:`KeyBatch.separator` is to be filled, by :meth:`separator_ids`
    needs_separators: ClassVar[bool] = False
    #: whether :attr:`KeyBatch.unrotated` is to be filled
    needs_unrotated: ClassVar[bool] = False
    #: whether it can score keys only at the end of a prompt, so that a schedule is refused
    prompt_only: ClassVar[bool] = False
    #: whether :attr:`KeyBatch.answer` and :attr:`LayerAttention.age` are to be filled
    needs_age: ClassVar[bool] = False
    #: keys that a head may hold beyond its limit once it decodes, for policies that count their newest keys apart
    beyond: int = 0
    #: whether :meth:`observe` is called for what follows a prompt, too, where a schedule evicts
    observes_steps: ClassVar[bool] = True
    #: in the authors' variant, whether the last layer of a pyramid has exactly its share, whatever the steps before it leave
    steps_to_last: ClassVar[bool] = False
    #: in the authors' variant, the share of the budget that every layer gives to the newest keys where content splits the rest
    newest: ClassVar[float] = 0.0
    #: whether scores depend on :attr:`KeyBatch.layer`, or rows are scored in turn, so that layers are scored one by one
    by_layer: ClassVar[bool] = False

    @abstractmethod
    def score(self, keys: KeyBatch) -> Tensor:
        """``[B, Hkv, K]`` float: keys of higher score stay; ``inf`` for keys that must stay."""

    def separator_ids(self, tokenizer: Any) -> Tensor:
        """The token ids that are separators, ``[n]`` long on the CPU."""
        raise NotImplementedError

    def observe(self, attention: LayerAttention, before: Tensor) -> Tensor:
        """Statistics of the attention of one forward, per key, ``[B, Hkv, K]`` float32.

        They reach :meth:`score` as ``keys.received``. With a schedule (``every``, ``cap``) they are stored with the cache:
        ``before`` holds those of the last call, zero for new keys. What follows a prompt is observed as a block of queries
        when keys are to be chosen, all layers as rows of one batch. By default a policy observes nothing.
        """
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_only and self.scheduled:
            raise MmaccelError(f"{self.name} scores the keys of a prompt when it ends; leave out every, cap and age.")
        uneven = self.choice("layer_budget")[0] != "uniform" or self.choice("head_budget")[0] != "uniform"
        if self.close_gaps and (uneven or self.decodes or self.budget != "exact"):
            raise MmaccelError(
                f"close_gaps of {self.name} needs as many keys in all heads of all layers, and none evicted later; leave it "
                "out, or leave out layer_budget, head_budget, every, cap and age, with a policy whose budget is exact."
            )
        if self.age and (self.budget == "none" or self.recalls):
            raise MmaccelError(f"{self.name} keeps all keys, so that pictures have no budget by age; leave out age.")
        if self.recalls and self.rest != "evict":
            raise MmaccelError(
                f"{self.name} chooses what a step reads and evicts nothing, so rest={self.rest!r} has no keys; leave it out."
            )

    def suits(self, family: ModelFacts) -> None:
        """Refuse models with latents in their cache where more than these is needed, or whose layers need the same tokens."""
        super().suits(family)
        if self.budget != "none":
            check_layers_alone(self.name, family)
        if family.latent and (why := self._beyond_latents) is not None:
            raise UnsupportedError(
                f"{self.name} {why}, and the cache of this {family.name} model holds latents, of which layers make keys and "
                "values; use 'snapkv' or another policy that scores keys by the attention of a prompt, with compact='evict'."
            )

    @property
    def _beyond_latents(self) -> str | None:
        """What it does that cannot be done with a cache of latents, as the middle of a sentence; None if nothing."""
        if self.recalls or self.rereads or self.guided:
            return "looks at keys and values beside those that attention reads"
        if self.needs_unrotated or self.future or self.needs_outgoing:
            return "looks at keys before RoPE, or at values behind the output projection"
        if self.lookahead:
            return "reads a text behind the prompt"
        if self.budget_in == "bytes":
            return "has its budget in bytes"
        return "merges keys" if self.choice("compact")[0] != "evict" else None

    def check(self, family: ModelFacts) -> None:
        """Raise :class:`MmaccelError` where options cannot be combined."""
        if self.shared and self.choice("head_budget")[0] != "uniform":
            raise MmaccelError(f"{self.name} keeps the same keys for all heads; leave out head_budget.")
        if self.extends and (why := fixed_keys(family)):
            raise UnsupportedError(f"{self.name}: {why}; leave it out, and show fewer pictures or frames.")

    def check_settings(self, positions: str, proportional: str) -> None:
        """As :meth:`Method.check_settings`; :attr:`text_policy` must be a policy that can rank text."""
        super().check_settings(positions, proportional)
        self.text_ranker()

    @property
    def merged_keys(self) -> int:
        """Number of keys of every head into which ``compact`` merges all that leave; 0 where it does not."""
        how, number = self.choice("compact")
        return int(number or 0) if how == "residual" else 0

    @property
    def needs_whole_prompt(self) -> str | None:
        """The reason why keys cannot be evicted after each chunk of a prompt, by what is known then; None where they can."""
        layers, heads = self.choice("layer_budget")[0], self.choice("head_budget")[0]
        if self.recalls:
            return None
        if self.rest != "evict":
            return f"packs the other keys when all of the prompt has read them (rest={self.rest!r})"
        if self.merged_keys:
            return f"merges the other keys in runs of the whole prompt (compact={self.compact!r})"
        if self.deferred:
            return "evicts keys when all layers have read the prompt"
        if self.future:
            return "scores keys by the mean of all queries of the prompt"
        if self.needs_unrotated:
            return "scores keys as they were before RoPE, which a cache does not store"
        if self.budget == "adaptive":
            return "lets the content of the whole prompt decide how many keys stay"
        if layers not in ("uniform", "pyramid", "kvpress"):
            return f"splits its budget over layers by the content of the whole prompt (layer_budget={layers!r})"
        if heads != "uniform":
            return f"splits its budget over heads by the content of the whole prompt (head_budget={heads!r})"
        return None

    def text_ranker(self) -> Policy | None:
        """The policy that :attr:`text_policy` names, with its default options.

        Raises :class:`MmaccelError` if it is unknown, no cache policy, or needs more than keys.
        """
        if not self.text_policy:
            return None
        ranker = get_method(self.text_policy)()
        if not isinstance(ranker, Policy) or ranker.window or ranker.observes or ranker.deferred:
            raise MmaccelError(
                f"text_policy={self.text_policy!r} cannot rank text keys: it must be a cache policy that needs keys only, such "
                "as 'streaming-llm'."
            )
        return ranker

    def recall(
        self, paid: Tensor, before: Tensor | None, visual: Tensor, count: Tensor, chosen: Tensor | None
    ) -> Tensor:
        """``[B, n]`` bool: the visual keys that a decode step reads in the layers from ``layer`` on (a sparse read).

        For policies that store all keys. The base calls it in layer ``layer - 1`` of every decode step.

        Parameters
        ----------
        paid, before : ``[B, n]`` float32, the attention paid to each place of the prompt in layer ``layer - 1`` by the token
            of this step, and by that of the last one; mean over heads.
        visual : ``[B, n]`` bool, the places of visual keys.
        count : ``[B]`` long, how many of them to read.
        chosen : ``[B, n]`` bool, what the last step read.
        """
        raise NotImplementedError

    #: whether the prompt is read again before keys are chosen, see :class:`~mmaccel.method.reread.RereadPolicy`
    rereads: ClassVar[bool] = False
    #: the number of tokens that the model writes behind a prompt before keys are chosen, see :attr:`KeyBatch.written`
    lookahead: int = 0
    #: whether texts are read behind the cache before keys are chosen, see :class:`~mmaccel.method.guides.GuidedPolicy`
    guided: ClassVar[bool] = False
    #: whether it is shown how little the model expected each token of a prompt, as :attr:`KeyBatch.received`
    needs_surprise: ClassVar[bool] = False
    #: whether :meth:`recall_by_logits` is called in place of :meth:`recall`
    sees_logits: ClassVar[bool] = False

    def recall_by_logits(self, logits: Tensor, visual: Tensor, count: Tensor) -> Tensor:
        """As :meth:`recall`, from the logits of layer ``layer - 1``.

        Parameters
        ----------
        logits : ``[B, Hq, m]`` float32, by place, of the prompt and of what followed; ``-inf`` where a head stores no key.
        visual : ``[B, n]`` bool, the places of visual keys in the prompt. count : ``[B]`` long, how many of them to read.
        """
        raise NotImplementedError

    @property
    def mixes_heads(self) -> bool:
        """Scores or budgets of heads are compared, or a recall is shown their mean."""
        return self.shared or not self.divides_heads or self.recalls

    @property
    def recalls(self) -> bool:
        """Whether :meth:`recall` is to be called at every decode step."""
        return self.sees_logits or type(self).recall is not Policy.recall

    #: whether every layer chooses what it reads by its own query, in place of :meth:`recall`
    chooses_by_layer: ClassVar[bool] = False
    #: whether every :meth:`recall` of an answer chooses equally many keys of a row, so that the host waits only once
    steady: ClassVar[bool] = False

    @property
    def decodes(self) -> bool:
        """Whether it looks at stored keys at every decode step, to evict by a schedule or to recall."""
        return self.scheduled or self.recalls

    @property
    def observes(self) -> bool:
        """Whether :meth:`observe` is to be called."""
        return type(self).observe is not Policy.observe


def moves_keys(family: ModelFacts) -> bool:
    """Whether keys of a model can be moved to other positions: RoPE turns halves, by angles that no length changes."""
    rope = family.model.config.get_text_config().rope_parameters or {}
    return bool(family.halves) and rope.get("rope_type") not in ("dynamic", "longrope")


def fixed_keys(family: ModelFacts) -> str | None:
    """The reason why keys of a model cannot be moved to other positions along one axis; None where they can."""
    if getattr(family, "model", None) is None:
        # a family as such, whose models differ
        return None
    if not moves_keys(family):
        return f"keys of this {family.name} model cannot be moved to other positions"
    if "mrope_section" in (family.model.config.get_text_config().rope_parameters or {}):
        return f"positions of this {family.name} model have three axes, and keys are moved along one"
    return None
