"""All settings: one frozen dataclass for each concern. gin binds nothing else.

Each field is declared once, with its type, range, default, unit and meaning. pydantic checks every
new instance. gin_files.py reads gin files into an `Experiment`. docs/configuration.py prints the
settings as a page. This module imports neither JAX nor TensorFlow, so that a wrong setting is
reported within a second.
"""

import dataclasses
import difflib
import fractions
import functools
import typing

import pydantic

# Prefix of a name in --init_from: the model and vocabulary of that run with fresh weights. This is
# the control of an experiment.
RANDOM = "random:"

Positive = typing.Annotated[int, pydantic.Field(ge=1)]
Count = typing.Annotated[int, pydantic.Field(ge=0)]
Seed = typing.Annotated[int, pydantic.Field(ge=0, lt=2**32)]
Axis = Positive | typing.Literal[-1]  # devices on one axis of the mesh
Above0 = typing.Annotated[float, pydantic.Field(gt=0)]
Share = typing.Annotated[float, pydantic.Field(ge=0, le=1)]
ShareBelowOne = typing.Annotated[float, pydantic.Field(ge=0, lt=1)]
Text = typing.Annotated[str, pydantic.Field(min_length=1)]
# A function of the user's own, `module:function` (own_parts.py).
OwnFunction = typing.Annotated[str, pydantic.Field(pattern=r"^[^\W\d][\w.]*:[^\W\d]\w*$")]
Family = typing.Literal[
    "bert",
    "camembert",
    "distilbert",
    "electra",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
]
Task = typing.Literal[
    "cola",
    "sst2",
    "mrpc",
    "stsb",
    "qqp",
    "mnli",
    "qnli",
    "rte",
    "wnli",
    "squad1",
    "squad2",
    "own",
    "conll",
]


class ConfigError(ValueError):
    """Wrong input. The command prints the message as one line."""

    status = 2  # exit status of the process


class RunError(RuntimeError):
    """The run cannot continue, for a reason other than wrong input. Printed as one line."""

    status = 1  # exit status of the process


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """The special ids of a vocabulary, and which ids continue a word. All other ids are text."""

    bos: int  # <s>, at the start of every segment
    pad: int
    eos: int  # </s>, after every line, and where a row ends inside a line
    unk: int
    mask: int
    continues_word: tuple[bool, ...] = ()  # one per id; random tokens and word masking need it

    @classmethod
    def of_size(cls, size: int) -> "SpecialIds":
        """Returns the ids of a vocabulary trained by this project, every id a whole word."""
        return cls(0, 1, 2, 3, size - 1, (False,) * size)

    @property
    def never_masked(self) -> tuple[int, ...]:
        """The ids that are never masked by default."""
        return (self.bos, self.pad, self.eos)


class Settings:
    """Base class of the settings dataclasses."""

    def check(self):
        """Raises ConfigError if values do not fit together. Subclasses override it."""

    def require(self, condition: bool, message: str):
        """Raises ConfigError with `Section.message` unless `condition` is true."""
        if not condition:
            raise ConfigError(f"{type(self).__name__}.{message}")

    def listed(self, name: str) -> tuple:
        """Returns a field as a tuple. A single value gives a tuple of one."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,)

    def require_distinct(self, name: str):
        """Raises ConfigError when the list in a field holds a value twice."""
        values = self.listed(name)
        self.require(len(set(values)) == len(values), f"{name} names a value twice: {values}")


def setting(
    default,
    meaning: str,
    unit: str = "",
    free: bool = False,
    fits_weights: typing.Literal["same", "any", "larger"] = "same",
    idle_with: dict[str, typing.Any] | None = None,
    names_code: bool = False,
    **limits,
):
    """Declares a field of a settings dataclass.

    Args:
        default: The value if no gin file binds the field. A function without arguments is called
            for each new instance.
        meaning: One sentence.
        unit: What the value counts or measures, in the plural.
        free: Whether the value may differ when a run resumes, because it changes no past step.
        fits_weights: Of a setting of the encoder, with which values a run can go on from weights
            that exist: the same, any, or with rotary positions also a larger one.
        idle_with: {other setting of the section: value} with which this one has no effect.
        names_code: Whether a value can name Python code of the user. gin_files.py takes no such
            value from the record of a run.
        **limits: Limits of pydantic.Field: ge, gt, le, lt, multiple_of.
    """
    limits |= {"default_factory" if callable(default) else "default": default}
    extra = {"unit": unit, "free": free, "fits_weights": fits_weights, "idle_with": idle_with or {}}
    extra["names_code"] = names_code
    return pydantic.Field(description=meaning, json_schema_extra=extra, **limits)


def names_own_code(value: typing.Any) -> bool:
    """Returns whether the value of a setting with `names_code` names Python code of the user."""
    return bool(value) and (not isinstance(value, str) or ":" in value)


def section(cls: type):
    """Declares a field that holds another section. gin binds that section by its own name."""
    return pydantic.Field(default_factory=cls)


def declare(cls: type) -> type:
    """Class decorator for a frozen dataclass that checks each new instance.

    Types are strict: text is not accepted for a number. Infinity and NaN are refused. Lists become
    tuples. A wrong value raises ConfigError.
    """
    rules = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    cls = pydantic.dataclasses.dataclass(frozen=True, config=rules)(cls)
    construct = cls.__init__

    @functools.wraps(construct)
    def checked_init(self, **values):
        try:
            construct(self, **{name: _without_lists(value) for name, value in values.items()})
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            name, value = first["loc"][0], str(first["input"])
            problem = first["msg"]
            if first["type"] == "string_pattern_mismatch":
                problem = "Input should be module:function"
            message = f"{cls.__name__}.{name}: {problem}, got {value[:80]!r}"
            if name not in field_names(cls):
                near = difflib.get_close_matches(name, field_names(cls), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                message = f"{cls.__name__}.{name}: there is no such setting{hint}"
            raise ConfigError(message) from None
        self.check()

    cls.__init__ = checked_init
    return cls


def _without_lists(value):
    """Returns the value with tuples for lists, also for the lists in a list or tuple."""
    return tuple(map(_without_lists, value)) if isinstance(value, (list, tuple)) else value


def field_names(cls: type, **properties: typing.Any) -> list[str]:
    """Returns the names of a section's settings, without fields that hold other sections.

    With `properties`, only those that were declared so: `field_names(Run, free=True)`.
    """
    return [
        name
        for name, field in cls.__pydantic_fields__.items()
        if (declared := field.json_schema_extra)
        and all(declared[key] == value for key, value in properties.items())
    ]


def idle_names(cls: type, values: dict[str, typing.Any]) -> list[str]:
    """Returns the settings of a section that have no effect beside `values` {setting: value}."""
    idle = []
    for name in field_names(cls):
        idle_with = cls.__pydantic_fields__[name].json_schema_extra["idle_with"]
        if any(values.get(other) == value for other, value in idle_with.items()):
            idle.append(name)
    return idle


@declare
class Vocabulary(Settings):
    """How text becomes ids."""

    file: Text | None = setting(
        None, "SentencePiece .model or Hugging Face tokenizer.json. None trains one."
    )
    size: Positive = setting(
        32768, "Ids, special tokens included; 300 or more. Not read with `file`.", "ids"
    )
    cased: bool = setting(False, "True keeps upper case. Not read with `file`.")
    sample_megabytes: float = setting(
        64.0,
        "Sample of the text that the vocabulary is trained on.",
        "MB",
        gt=0,
    )

    def check(self):
        self.require(self.file is not None or self.size >= 300, "size must be 300 or more")


@declare
class Corpus(Settings):
    """Where text comes from and how it is cut into rows."""

    sources: dict[Text, Above0 | typing.Literal["all"]] = setting(
        lambda: {"installed_docs": 1.0},
        "Share of the rows by source: `installed_docs`, `files:GLOB`, `tfds:NAME` or `seqio:NAME`. "
        "'all' for each of them reads every row once an epoch.",
    )
    text_files: Text | None = setting(
        None, "Glob of text files (docs/data.md). It replaces `sources`."
    )
    text_field: Text | tuple[Text, ...] = setting(
        "text",
        "Field, column or feature that holds the document (docs/data.md). Of several names, the "
        "first that a file or record has.",
    )
    documents: dict[Text, Positive | Text] = setting(
        dict,
        "What a document is, by source: so many consecutive rows of a table (a number), or the "
        "consecutive rows with one value in a column (its name). Else each row is one.",
    )
    task_modules: tuple[Text, ...] = setting(
        (), "Python modules that register `seqio:` names.", names_code=True
    )
    sequence_length: int = setting(512, "Length of a row.", "tokens", ge=8)
    heldout_fraction: float | None = setting(
        None,
        "Share of documents kept for evaluation. None: 0.005, or none with `heldout_files`.",
        gt=0,
        lt=0.5,
    )
    heldout_files: Text | None = setting(
        None, "Glob of text files for evaluation, instead of a share of the documents."
    )
    skip_bad_files: bool = setting(False, "True leaves out files that cannot be read.", free=True)
    rows_dir: Text = setting("rows", "Folder of prepared rows, shared by runs.", free=True)
    shuffle_shards: int = setting(
        0, "Files whose rows are shuffled together. 0 is all of a source.", ge=0
    )
    processes: int = setting(0, "Tokenising processes. 0 is one for each core.", ge=0, free=True)

    def check(self):
        self.require(len(self.sources) > 0, "sources must name at least one source")
        whole = [rate == "all" for rate in self.sources.values()]
        self.require(
            all(whole) or not any(whole), "sources: give 'all' to every source, or to none of them"
        )
        self.require(len(self.listed("text_field")) > 0, "text_field must name a field")
        known = {*self.rates, f"files:{self.heldout_files}"}
        for source in self.documents:
            is_known = source in known or source.startswith("seqio:")  # a member of a Mixture
            self.require(
                is_known,
                f"documents: {source!r} is none of the sources {', '.join(sorted(self.rates))}. "
                "Name it as a source of its own in Corpus.sources",
            )
        self.require(
            self.heldout_files is None or self.heldout_fraction is None,
            f"heldout_files and heldout_fraction={self.heldout_fraction} both name held-out text. "
            "Set one of them to None",
        )
        for source in self.sources:
            kind, _, name = source.partition(":")
            named = kind in ("files", "tfds", "seqio") and name != ""
            known = source == "installed_docs" or named
            kinds = "installed_docs, files:GLOB, tfds:NAME, seqio:NAME"
            self.require(known, f"sources: {source!r} is none of {kinds}")

    @property
    def heldout_share(self) -> float:
        """Share of the documents of the sources that are kept for evaluation."""
        if self.heldout_files is not None:
            return 0.0
        return 0.005 if self.heldout_fraction is None else self.heldout_fraction

    @property
    def reads_all(self) -> bool:
        """Whether an epoch reads every row of each source once ('all')."""
        return not self.text_files and "all" in self.sources.values()

    @property
    def rates(self) -> dict[str, float]:
        """{source: expected share of the rows of a batch}, summing to 1.

        The shares are equal if the sources are read whole (`reads_all`), until their rows are
        prepared (`prepare.Prepared.rates`).
        """
        sources = {f"files:{self.text_files}": 1.0} if self.text_files else self.sources
        if self.reads_all:
            sources = dict.fromkeys(sources, 1.0)
        total = sum(sources.values())
        return {source: rate / total for source, rate in sources.items()}


@declare
class Masking(Settings):
    """Which positions are masked, and what stands there in the encoder's input (section 3)."""

    rate: float = setting(
        0.15, "Masked share of a row's tokens. `<s>` and `</s>` count.", gt=0, lt=1
    )
    heldout_rate: float | None = setting(
        None,
        "Rate in evaluations and rank measurements. None: `rate`.",
        gt=0,
        lt=1,
    )
    unit: typing.Literal["token", "word", "span"] = setting(
        "token",
        "What is masked as a whole, at most ten tokens. A word ends at a space. A span has "
        "4.5 tokens on average.",
    )
    random_fraction: Share = setting(
        0.0,
        "Share of the masked positions in the encoder that get a random token (BERT: 0.1).",
    )
    keep_fraction: Share = setting(
        0.0,
        "Share of the masked positions in the encoder that keep their token (BERT: 0.1).",
    )
    strategy: OwnFunction | None = setting(
        None,
        "Function of your own that says how likely a token is masked (docs/own_parts.md).",
        names_code=True,
    )
    strategy_parameters: dict[Text, bool | int | float | Text] = setting(
        dict, "Further arguments of `strategy`, by name."
    )
    renumber: bool = setting(False, "True numbers only visible tokens: 0, 1, 2, ...")
    mask_special_tokens: bool = setting(False, "True masks `<s>` and `</s>` as well.")

    def check(self):
        shares = self.random_fraction + self.keep_fraction
        self.require(
            shares <= 1,
            f"random_fraction and keep_fraction must not exceed 1 together, got {shares}",
        )
        self.require(
            self.strategy is not None or not self.strategy_parameters,
            "strategy_parameters are arguments of Masking.strategy, which is None",
        )

    def __hash__(self) -> int:  # without the dict, which has none: an Objective is a key
        return hash((self.rate, self.heldout_rate, self.unit, self.strategy))


class ObjectiveKind(typing.NamedTuple):
    """What tells one objective from another.

    Attributes:
        title: Its name in tables and cards. `{delta}` stands for the encoder_mask_fraction.
        reads: What a card says of the masked tokens. `{share}` is the encoder_mask_fraction.
        encoder_mask_fraction: Share of the masked positions that the encoder reads. None:
            `Objective.mask_fraction`.
        has_decoder: Whether a decoder predicts.
        predicts_tokens: Whether the prediction head predicts tokens. If not, `evaluate` measures
            the loss on the held-out rows of the run only.
    """

    title: str
    reads: str
    encoder_mask_fraction: float | None = 1.0
    has_decoder: bool = False
    predicts_tokens: bool = True


OBJECTIVES = {
    "mae_lm": ObjectiveKind(
        "MAE-LM (arXiv 2302.02060)",
        "The encoder sees none of these",
        encoder_mask_fraction=0.0,
        has_decoder=True,
    ),
    "mlm": ObjectiveKind("MLM", "The encoder reads [MASK] at these"),
    "between": ObjectiveKind(
        "between MAE-LM and MLM (delta {delta})",
        "The encoder reads something at {share} of these",
        encoder_mask_fraction=None,
        has_decoder=True,
    ),
    "causal": ObjectiveKind("next tokens", ""),
}


@declare
class Objective(Settings):
    """What pretraining predicts, and what the encoder sees of it (paper, sections 3 and 4.3)."""

    name: typing.Literal[tuple(OBJECTIVES)] = setting(
        "mae_lm",
        "`mae_lm`: no [MASK] enters the encoder, a decoder predicts. `mlm`: all do, and there is "
        "no decoder. `between`: `mask_fraction` of them do, and a decoder predicts. `causal`: next "
        "tokens, as a first phase (recipes/causal_phase.gin). Nothing is masked then.",
    )
    mask_fraction: Share | None = setting(
        None, "With `between`, share of the masked positions whose [MASK] enters the encoder."
    )
    causal_share: ShareBelowOne = setting(
        0.0, "Share of the rows of a batch that predict next tokens instead (docs/phases.md)."
    )
    masking: Masking = section(Masking)

    def check(self):
        predicts_masked = self.name != "causal" and self.kind.predicts_tokens
        self.require(
            predicts_masked or not self.causal_share,
            f"causal_share is of objectives that predict masked tokens, not of {self.name!r}",
        )
        self.require(
            self.causal_share == 0 or 0 < self.causal_rows < 1,
            f"causal_share must be 0, or from 0.001 to 0.999, got {self.causal_share}",
        )
        self.require(
            self.mask_fraction is not None or self.name != "between",
            "name = 'between' needs mask_fraction, from 0 to 1",
        )
        shares = self.masking.random_fraction + self.masking.keep_fraction
        if shares and not self.encoder_mask_fraction:
            raise ConfigError(
                "Masking.random_fraction and keep_fraction say what enters the encoder. Set "
                "Objective.name = 'mlm', or 'between' with a mask_fraction above 0"
            )

    @property
    def kind(self) -> ObjectiveKind:
        """What tells it from other objectives."""
        return OBJECTIVES[self.name]

    @property
    def has_decoder(self) -> bool:
        """Whether a decoder predicts."""
        return self.kind.has_decoder

    @property
    def causal_rows(self) -> fractions.Fraction:
        """`causal_share` as n of m rows: 1/16 for 0.0625."""
        return fractions.Fraction(self.causal_share).limit_denominator(1000)

    def require_tokens(self, name: str):
        """Raises ConfigError if the model `name` predicts no tokens, so that none can be scored."""
        if not self.kind.predicts_tokens:
            raise ConfigError(
                f"{name} predicts no tokens (Objective.name = {self.name!r}). Measure it with "
                f"maelm_jax.evaluate --models={name}, on the held-out rows of its run"
            )

    def require_next_tokens(self, name: str):
        """Raises ConfigError if the encoder of the model `name` does not learn next tokens."""
        if self.name != "causal" and not self.causal_share:
            raise ConfigError(
                f"{name} has not learned next tokens, so it is not scored left to right. Train a "
                "run with Objective.causal_share, or leave --left_to_right out"
            )

    @property
    def left_to_right(self) -> "Objective":
        """The objective of next tokens. It predicts `</s>` too if this one does."""
        masking = Masking(mask_special_tokens=self.masking.mask_special_tokens)
        return Objective(name="causal", masking=masking)

    @property
    def encoder_mask_fraction(self) -> float:
        """Share of the masked positions that the encoder reads (delta in section 4.3)."""
        fraction = self.kind.encoder_mask_fraction
        return self.mask_fraction if fraction is None else fraction

    @property
    def visible_mask_fraction(self) -> float:
        """Share of the masked positions that the encoder may read as [MASK].

        It is 0 if a random or the same token stands at each of them and a decoder predicts them.
        """
        is_replaced = self.masking.random_fraction + self.masking.keep_fraction == 1
        return 0.0 if is_replaced and self.has_decoder else self.encoder_mask_fraction

    def without_replacement(self, masking: Masking) -> "Objective":
        """Returns the objective with `masking`, which puts no random or kept token anywhere.

        The encoder reads [MASK] at as many masked positions as in pretraining.
        """
        if not self.has_decoder:
            return dataclasses.replace(self, masking=masking)
        return Objective.between(self.visible_mask_fraction, masking)

    @classmethod
    def between(cls, mask_fraction: float, masking: Masking | None = None) -> "Objective":
        """Returns the objective of a decoder, whose encoder reads this share of the [MASK]s."""
        masking = masking or Masking()
        if mask_fraction == 0:
            return cls(masking=masking)
        return cls(name="between", mask_fraction=float(mask_fraction), masking=masking)

    @property
    def unit(self) -> str:
        """The unit of its loss."""
        return "nats per predicted token" if self.kind.predicts_tokens else "nats"

    @property
    def title(self) -> str:
        """Its name in tables and cards."""
        title = self.kind.title.format(delta=self.encoder_mask_fraction)
        return f"{title}, {self.causal_rows} of the rows causal" if self.causal_share else title


@declare
class Stack(Settings):
    """A stack of Transformer layers: what determines its function."""

    layers: int = setting(12, "Layers.", "layers", ge=1)
    width: Positive = setting(768, "Size of a hidden state.", "values")
    heads: Positive = setting(12, "Attention heads. They divide `width`.", "heads")
    feed_forward: int = setting(3072, "Width of the feed-forward block.", "values", ge=1)
    feed_forward_gate: bool = setting(False, "True adds a second linear map: GeGLU.")
    hidden_act: typing.Literal["gelu", "gelu_new"] = setting(
        "gelu",
        "Activation of the feed-forward block. `gelu_new` approximates GELU by tanh. Exports to "
        "stock BERT and DistilBERT have `gelu` only.",
    )
    normalization: typing.Literal["post", "pre"] = setting(
        "post", "LayerNorm after each sum (`post`, BERT) or before each sublayer (`pre`)."
    )
    biases: bool = setting(True, "False leaves out the biases of layers and normalizations.")
    positions: typing.Literal["learned", "rotary"] = setting(
        "learned", "`learned` adds rows of a table, `rotary` turns queries and keys."
    )
    rotary_theta: float = setting(
        10_000.0,
        "Base of the wavelengths of rotary positions.",
        gt=1,
        fits_weights="any",
        idle_with={"positions": "learned"},
    )
    max_positions: int = setting(
        512, "Longest row; size of a learned table.", "tokens", ge=1, fits_weights="larger"
    )
    relative_buckets: typing.Literal["t5", "reference", "none"] = setting(
        "t5",
        "Relative position bias. `t5` loads into stock MPNet, `none` into stock RoBERTa.",
    )
    num_buckets: int = setting(
        32,
        "Buckets of the bias.",
        "buckets",
        ge=8,
        multiple_of=4,
        idle_with={"relative_buckets": "none"},
    )
    max_distance: Positive = setting(
        128,
        "From here on all pairs share a bucket.",
        "tokens",
        idle_with={"relative_buckets": "none"},
    )
    layer_norm_eps: float = setting(1e-5, "Added to the variance in layer normalisation.", gt=0)

    def check(self):
        wrong = f"width {self.width} is not divisible by heads {self.heads}"
        self.require(self.width % self.heads == 0, wrong)
        self.require(
            self.max_distance > self.num_buckets // 2,
            f"max_distance must exceed num_buckets / 2, got {self.max_distance}",
        )
        rotary = self.positions == "rotary"
        self.require(
            not rotary or self.relative_buckets == "none",
            f"positions = 'rotary' needs relative_buckets = 'none', got {self.relative_buckets!r}",
        )
        self.require(
            not rotary or self.head_size % 2 == 0,
            f"positions = 'rotary' needs heads of an even size, got {self.head_size}",
        )

    @property
    def canonical(self) -> typing.Self:
        """The stack of the same function in which settings without effect have their defaults."""
        fields = type(self).__pydantic_fields__
        idle = idle_names(type(self), dataclasses.asdict(self))
        return dataclasses.replace(self, **{name: fields[name].default for name in idle})

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def feed_forward_kernels(self) -> int:
        """The number of matrices in a feed-forward block."""
        return 3 if self.feed_forward_gate else 2


@declare
class Encoder(Stack):
    """The encoder, which is kept after pretraining."""

    local_attention: Count = setting(
        0, "Window of local attention, half to each side. 0 is none.", "tokens", fits_weights="any"
    )
    global_every: Positive = setting(
        3,
        "Layers 0, n, 2n, ... have global attention.",
        "layers",
        fits_weights="any",
        idle_with={"local_attention": 0},
    )
    local_rotary_theta: float = setting(
        10_000.0,
        "`rotary_theta` of layers with local attention.",
        gt=1,
        fits_weights="any",
        idle_with={"local_attention": 0},
    )
    token_types: int = setting(
        0, "Token types: 1 in RoBERTa, 2 in BERT. 0 is no table.", "types", ge=0
    )
    family: Family | None = setting(
        None,
        "Stock family: sentence pairs, heads and class of an export. None is the first that fits.",
    )

    def check(self):
        super().check()
        self.require(
            self.positions == "rotary" or self.local_attention == 0,
            "local_attention needs positions = 'rotary'",
        )

    @property
    def canonical(self) -> typing.Self:
        """The encoder of the same function in which settings without effect have their defaults."""
        period = min(self.global_every, self.layers)
        window = self.local_attention if period > 1 else 0
        own = dataclasses.replace(self, global_every=period, local_attention=window)
        return super(Encoder, own).canonical


@declare
class Decoder(Settings):
    """The decoder, which predicts in pretraining. Its layers are of the encoder's kind."""

    layers: Positive = setting(4, "Layers.", "layers")
    width: Positive | None = setting(
        None, "Size of a hidden state. None is that of the encoder.", "values"
    )
    attention: typing.Literal["self", "self+cross", "cross"] = setting(
        "self", "What it attends to: its own states (self), the encoder's (cross) or both in turn."
    )
    causal: bool = setting(False, "True hides later slots from its self-attention.")
    slots: typing.Literal["all", "masked"] = setting(
        "all", "Slots that it computes. `masked` needs cross-attention."
    )
    refills_mask: bool = setting(
        True, "True gives it [MASK] also where the encoder saw a masked slot."
    )
    relative_bias: bool = setting(False, "True gives it a relative bias of its own.")

    def check(self):
        self.require(
            self.slots == "all" or "cross" in self.attention,
            "slots = 'masked' needs attention with 'cross'",
        )
        self.require(
            not self.causal or "self" in self.attention, "causal needs attention with 'self'"
        )

    @property
    def is_plain(self) -> bool:
        """Whether it is the paper's: of the encoder's width, with bidirectional self-attention."""
        plain = Decoder(layers=self.layers, relative_bias=self.relative_bias)
        return dataclasses.replace(self, refills_mask=True) == plain

    def canonical(self, encoder: Encoder) -> "Decoder":
        """Returns the decoder with the width None if its width is that of `encoder`."""
        is_same = self.width == encoder.width
        return dataclasses.replace(self, width=None) if is_same else self

    def check_fit(self, encoder: Encoder):
        """Raises ConfigError if the decoder cannot have layers of the encoder's kind."""
        self.require(
            (self.width or 0) % encoder.head_size == 0,
            f"width {self.width} is not a multiple of the encoder's head size {encoder.head_size}",
        )
        self.require(
            encoder.positions != "rotary" or not self.relative_bias,
            "relative_bias needs Encoder.positions = 'learned'",
        )

    def stack(self, encoder: Encoder) -> Stack:
        """Returns its layers: of the encoder's kind, heads and feed-forward in proportion.

        No layer of a decoder has local attention.
        """
        width, buckets = self.width or encoder.width, encoder.relative_buckets
        if not self.relative_bias:
            buckets = "none"
        elif buckets == "none":
            buckets = "t5"
        values = {name: getattr(encoder, name) for name in field_names(Stack)} | {
            "layers": self.layers,
            "width": width,
            "heads": width // encoder.head_size,
            "feed_forward": max(width * encoder.feed_forward // encoder.width, 1),
            "relative_buckets": buckets,
        }
        return Stack(**values)


@declare
class Init(Settings):
    """How weights start."""

    std: float = setting(0.02, "Standard deviation of the initial weights.", gt=0)
    relative_bias: typing.Literal["normal", "local"] = setting(
        "normal",
        "How a relative bias starts. `local` is minus the distance times a slope per head.",
    )
    unigram_bias: bool = setting(False, "True starts the head's bias at log frequencies.")


@declare
class Dropout(Settings):
    """Dropout of the encoder. The decoder has none."""

    hidden: ShareBelowOne = setting(0.1, "Of the embeddings and of what a sublayer adds.")
    attention: ShareBelowOne = setting(0.1, "Of the attention weights.")


@declare
class Compute(Settings):
    """How the model is computed. Nothing here changes its function."""

    dtype: typing.Literal["float32", "bfloat16"] = setting(
        "float32", "Type of the computation. Parameters are float32."
    )
    attention_backend: typing.Literal["auto", "xla", "cudnn", "pallas_tpu"] = setting(
        "auto",
        "`auto` is a fused kernel where the device has one.",
        free=True,
    )
    rematerialise: bool = setting(False, "True recomputes layers in the backward pass.", free=True)
    scan_layers: bool | None = setting(
        None,
        "True loops over one compiled layer. None: True on CPUs, and on TPUs with Mesh.tensor.",
        free=True,
    )


class StackSettings(typing.NamedTuple):
    """All that a stack of layers is built from and computed with."""

    stack: Stack
    init: Init
    dropout: Dropout
    compute: Compute


@dataclasses.dataclass(frozen=True)
class Model:
    """All that a model is built from and computed with. gin binds its parts.

    Two models compute the same function of the same weights if `encoder`, `decoder` and `causal`
    are equal.
    """

    encoder: Encoder = dataclasses.field(default_factory=Encoder)
    decoder: Decoder | None = None
    causal: bool = False  # predicts each token from those before it
    init: Init = dataclasses.field(default_factory=Init)
    dropout: Dropout = dataclasses.field(default_factory=Dropout)
    compute: Compute = dataclasses.field(default_factory=Compute)

    def __post_init__(self):
        if self.decoder:
            self.decoder.check_fit(self.encoder)
        if self.causal and (self.decoder or self.encoder.local_attention):
            raise ConfigError(
                "Objective.name = 'causal' and Objective.causal_share need "
                "Encoder.local_attention = 0"
            )

    @property
    def encoder_settings(self) -> StackSettings:
        """What the encoder's layers are built from."""
        return StackSettings(self.encoder, self.init, self.dropout, self.compute)

    @property
    def decoder_settings(self) -> StackSettings:
        """What the decoder's layers are built from."""
        return StackSettings(
            self.decoder.stack(self.encoder),
            self.init,
            Dropout(hidden=0.0, attention=0.0),
            self.compute,
        )

    @property
    def without_decoder(self) -> "Model":
        """The model of the encoder alone."""
        return dataclasses.replace(self, decoder=None)


@declare
class Optimizer(Settings):
    """AdamW as in the published code, or Muon. The learning rate rises linearly to its peak."""

    kind: typing.Literal["adamw", "muon"] = setting(
        "adamw",
        "Optimiser of the layers' matrices. AdamW updates all else. Fine-tuning accepts "
        "AdamW only.",
    )
    learning_rate: Above0 = setting(5e-4, "Peak learning rate of AdamW. Runs log it.")
    muon_learning_rate: Above0 = setting(2e-3, "Peak learning rate of Muon.")
    warmup_steps: Count = setting(
        10_000,
        "Steps until the peak, at most those of the run.",
        "steps",
    )
    schedule: typing.Literal["linear", "cosine", "wsd", "decay"] | OwnFunction = setting(
        "linear",
        "After the warm-up, the rate falls to 0 over all other steps, linearly (`linear`) or as "
        "half a cosine wave (`cosine`), or linearly over the last ones (`wsd`). `decay` falls from "
        "the rate of Run.continue_from to 0 as 1 - sqrt(share of the steps done). A function of "
        "your own: docs/own_parts.md.",
        names_code=True,
    )
    schedule_parameters: dict[Text, bool | int | float | Text] = setting(
        dict, "Further arguments of a `schedule` of your own, by name."
    )
    decay_share: ShareBelowOne = setting(
        0.1, "With wsd, the share of all steps in which the rate falls."
    )
    b1: ShareBelowOne = setting(0.9, "Decay of Adam's first moment.")
    b2: ShareBelowOne = setting(0.98, "Decay of Adam's second moment.")
    eps: float = setting(1e-6, "Added to the denominator of Adam's update.", gt=0)
    weight_decay: float = setting(0.01, "Decoupled from the gradient.", ge=0)
    decay_norms_and_biases: bool = setting(
        True, "False exempts biases and the scales of LayerNorms from the decay."
    )
    clip_norm: float = setting(2.0, "Largest norm of the gradient. 0 is no limit.", ge=0)

    def check(self):
        self.require(
            names_own_code(self.schedule) or not self.schedule_parameters,
            f"schedule_parameters are arguments of a function, and schedule={self.schedule!r}",
        )


@declare
class Mesh(Settings):
    """How devices are divided. The product is the number of devices."""

    data: Axis = setting(
        -1,
        "Data parallelism. One axis can be -1: the devices that are left.",
        "devices",
        free=True,
    )
    fsdp: Axis = setting(
        1, "Data parallelism with sharded parameters and moments.", "devices", free=True
    )
    tensor: Axis = setting(1, "Tensor parallelism.", "devices", free=True)

    def check(self):
        sizes = (self.data, self.fsdp, self.tensor)
        self.require(sizes.count(-1) <= 1, f"sizes can hold one -1 at most, got {sizes}")


@declare
class Run(Settings):
    """The length of a run and what it leaves behind."""

    train_steps: int = setting(125_000, "Length of the run.", "steps", ge=1, free=True)
    batch_size: Positive = setting(2048, "Rows of a step, over all devices.", "rows")
    accumulate: Positive = setting(
        1, "Parts that a step is computed in.", "microbatches", free=True
    )
    seed: Seed = setting(0, "Seed of data order, weights and masks.")
    init_from: Text | None = setting(
        None,
        "Encoder whose weights to start from (docs/encoders.md).",
    )
    continue_from: Text | None = setting(
        None,
        "Run to go on from, with its optimiser: WORKDIR, or WORKDIR@STEP.",
    )
    log_every: Positive = setting(100, "Steps between lines of metrics.", "steps", free=True)
    log_to: typing.Literal["tensorboard", "wandb"] | OwnFunction = setting(
        "tensorboard",
        "Where the values of metrics.jsonl also go: TensorBoard, Weights & Biases, or a writer of "
        "your own (docs/own_parts.md).",
        free=True,
        names_code=True,
    )
    eval_every: Positive = setting(5_000, "Steps between evaluations.", "steps", free=True)
    eval_rows: Positive = setting(4096, "Size of an evaluation, the same each time.", "rows")
    rank_every: Count = setting(
        5_000, "Steps between effective ranks. 0 is never.", "steps", free=True
    )
    checkpoint_every: Positive = setting(5_000, "Steps between checkpoints.", "steps", free=True)
    checkpoint_minutes: Above0 | None = setting(
        None,
        "Also a checkpoint so long after the last one. Several processes look at the clock every "
        "log_every steps.",
        "minutes",
        free=True,
    )
    keep_every: Positive | None = setting(
        None,
        "Checkpoints at its multiples are kept, besides the newest 3.",
        "steps",
        free=True,
    )
    keep_at: tuple[Positive, ...] = setting(
        (), "Checkpoints are written after these steps, and kept.", "steps", free=True
    )
    keep_at_words: tuple[Positive, ...] = setting(
        (),
        "Checkpoints are written after so much text, and kept (docs/babylm.md).",
        "words",
        free=True,
    )

    def check(self):
        self.require_distinct("keep_at")
        self.require_distinct("keep_at_words")
        self.require(
            not (self.init_from and self.continue_from),
            "init_from and continue_from are both given. Leave one of them out",
        )


@declare
class Grid(Settings):
    """Hyper-parameters of fine-tuning. A field with a list makes a grid of every combination."""

    seeds: Seed | tuple[Seed, ...] = setting(1, "Seeds of the runs.")
    batch_size: Positive | tuple[Positive, ...] = setting(32, "Examples of a step.", "examples")
    learning_rate: Above0 | tuple[Above0, ...] = setting(3e-5, "Peak learning rate.")
    epochs: Positive | tuple[Positive, ...] = setting(3, "Passes over the data.", "epochs")
    small_task_epochs: Positive | tuple[Positive, ...] = setting(
        (), "Tried as well below 10,000 training examples.", "epochs"
    )
    warmup: ShareBelowOne | tuple[ShareBelowOne, ...] = setting(
        0.06, "Share of all steps until the peak."
    )

    def check(self):
        for name in ("seeds", "batch_size", "learning_rate", "epochs", "warmup"):
            self.require_distinct(name)
            self.require(bool(self.listed(name)), f"{name} must hold a value")
        self.require_distinct("small_task_epochs")


@declare
class CustomTask(Settings):
    """The task `own`: labels or scores of texts in your own files."""

    columns: tuple[Text, ...] = setting(
        (),
        "One or two columns of text. Empty: the usual names (docs/finetuning.md).",
    )
    label: Text = setting("label", "Column of the label, labels or score.")
    labels: tuple[Text, ...] = setting((), "Every label. Empty: those of the training file.")
    label_separator: Text | None = setting(
        None, "Separator of the labels of a text that can have several, or none."
    )
    score_range: tuple[float, ...] = setting((), "Lowest and highest score of a regression.")

    def check(self):
        columns = (*self.columns, self.label)
        self.require(
            len(columns) <= 3 and len(set(columns)) == len(columns),
            f"columns must be one or two columns beside label {self.label!r}, got {self.columns}",
        )
        self.require(
            len(set(self.labels)) == len(self.labels) != 1,
            f"labels must name two classes or more, each once, got {self.labels}. "
            "In a regression, give CustomTask.score_range=(LOWEST, HIGHEST) instead",
        )
        lines = [label for label in self.labels if any(mark in label for mark in "\t\n\r")]
        self.require(not lines, f"labels: {lines} hold a tab or the end of a line. Rename them")
        if self.score_range:
            self.require(
                not self.labels and self.label_separator is None,
                "score_range is of a regression, which has no labels and no label_separator",
            )
            self.require(
                len(self.score_range) == 2 and self.score_range[0] < self.score_range[1],
                f"score_range must be the lowest and the highest score, got {self.score_range}",
            )
        separator = self.label_separator
        self.require(
            separator == " " or separator is None or not separator.isspace(),
            f"label_separator={separator!r} separates cells or lines. Choose another, as ','",
        )
        unclear = [label for label in self.labels if separator is not None and separator in label]
        self.require(not unclear, f"labels: {unclear} contain the label_separator {separator!r}")


@declare
class Conll(Settings):
    """The task `conll`: labels of words in your own files."""

    word_column: int = setting(0, "Column of the word, from 0. -1 is the last.")
    label_column: int = setting(-1, "Column of the label, from 0. -1 is the last.")


@declare
class Finetune(Settings):
    """Fine-tuning. The sections below have its other settings."""

    tasks: Task | tuple[Task, ...] = setting((), "One task makes a run, a list makes a table.")
    init_from: Text | None = setting(None, "The encoder, from --init_from.")
    data_dir: Text | None = setting(
        None,
        "Folder of the data (docs/finetuning.md). None reads TFDS.",
        free=True,
    )
    train_file: Text | None = setting(
        None,
        "Training file of `own` or `conll` (docs/finetuning.md).",
        free=True,
    )
    dev_file: Text | None = setting(
        None,
        "File to evaluate on. None: a tenth of the training file of `own`.",
        free=True,
    )
    evaluations: Positive = setting(
        2, "Evaluations in an epoch, fewer if they do not divide its steps.", "evaluations"
    )
    max_length: int = setting(
        512, "Longest input, at most the encoder's positions.", "tokens", ge=8
    )
    train_examples: Positive | None = setting(None, "Sample to train on. None is all.", "examples")
    dev_examples: Positive | None = setting(
        None, "Sample of each dev set to evaluate on. None is all.", "examples"
    )
    class_weights: typing.Literal["none", "balanced"] = setting(
        "none", "`balanced` raises the loss of rare labels, by the inverse of their share."
    )
    metric: Text | None = setting(
        None, "Metric of the dev set that is the score. None: that of the task."
    )
    patience: Positive | None = setting(
        None, "Training ends after so many evaluations without a gain. None: never.", "evaluations"
    )
    grid: Grid = section(Grid)
    custom: CustomTask = section(CustomTask)
    conll: Conll = section(Conll)

    def check(self):
        self.require_distinct("tasks")
        own, conll = (task in self.listed("tasks") for task in ("own", "conll"))
        self.require(
            self.train_file is not None or not (own or conll),
            "train_file is missing. Give --gin.TRAIN_FILE=FILE",
        )
        self.require(
            self.dev_file is not None or not conll,
            "dev_file is missing. Give --gin.DEV_FILE=FILE",
        )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All settings of one run.

    `decoder` is None if the objective has none, and in fine-tuning. `finetune` is None in
    pretraining.
    """

    vocabulary: Vocabulary = dataclasses.field(default_factory=Vocabulary)
    corpus: Corpus = dataclasses.field(default_factory=Corpus)
    objective: Objective = dataclasses.field(default_factory=Objective)
    encoder: Encoder = dataclasses.field(default_factory=Encoder)
    decoder: Decoder | None = dataclasses.field(default_factory=Decoder)
    init: Init = dataclasses.field(default_factory=Init)
    dropout: Dropout = dataclasses.field(default_factory=Dropout)
    compute: Compute = dataclasses.field(default_factory=Compute)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    run: Run = dataclasses.field(default_factory=Run)
    finetune: Finetune | None = None

    def __post_init__(self):
        if self.finetune or not self.objective.has_decoder:
            object.__setattr__(self, "decoder", None)
        elif self.decoder is None:
            raise ConfigError(f"Objective.name = {self.objective.name!r} needs a decoder")
        length, positions = self.corpus.sequence_length, self.encoder.max_positions
        if not self.run.init_from:  # else encoders/adoption.py checks it with that encoder
            _ = self.model  # checks that its parts fit together
            if self.objective.causal_share:
                _ = self.left_to_right
            if length > positions:
                raise ConfigError(
                    f"Corpus.sequence_length {length} is longer than the position table: lower it "
                    f"to {positions}, or set Encoder.max_positions to {length} or more"
                )
        masking = self.objective.masking
        if masking.renumber and self.encoder.local_attention:
            raise ConfigError(
                "Masking.renumber needs Encoder.local_attention = 0, which takes tokens to be at "
                "most as many slots apart as positions"
            )
        for name in ("rate", "heldout_rate"):
            rate = getattr(masking, name)
            if rate is not None and rate * length < 1:
                raise ConfigError(
                    f"Masking.{name}={rate:g} masks less than one of the {length} tokens of a row. "
                    f"Use {1 / length:.2g} or more"
                )
        if self.finetune is not None and self.optimizer.kind != "adamw":
            raise ConfigError(
                f"Optimizer.kind = {self.optimizer.kind!r} works in pretraining only. Set 'adamw' "
                "to fine-tune, or leave the finetune files out to pretrain"
            )
        if self.finetune is not None and names_own_code(self.optimizer.schedule):
            raise ConfigError(
                f"Optimizer.schedule={self.optimizer.schedule}: a function of your own works in "
                "pretraining only. Set 'linear', 'cosine' or 'wsd' to fine-tune"
            )
        if self.optimizer.schedule == "decay" and not self.run.continue_from:
            raise ConfigError(
                "Optimizer.schedule = 'decay' needs Run.continue_from, the run that it goes on from"
            )
        self._check_accumulation()

    @property
    def model(self) -> Model:
        """The model of the run."""
        causal = self.objective.name == "causal"
        return Model(self.encoder, self.decoder, causal, self.init, self.dropout, self.compute)

    def with_model(self, model: Model) -> typing.Self:
        """Returns the settings with the encoder, the decoder and the computation of `model`."""
        names = ("encoder", "decoder", "init", "dropout", "compute")
        return dataclasses.replace(self, **{name: getattr(model, name) for name in names})

    @property
    def tokens_per_step(self) -> int:
        """The tokens of the rows of a step, with padding."""
        return self.run.batch_size * self.corpus.sequence_length

    @property
    def evaluated(self) -> typing.Self:
        """Settings of evaluations and rank measurements.

        Their mask rate is the held-out one, and all rows are masked unless all are causal.
        """
        masking = self.objective.masking
        rate = masking.heldout_rate or masking.rate
        masking = dataclasses.replace(masking, rate=rate, heldout_rate=None)
        objective = dataclasses.replace(self.objective, masking=masking, causal_share=0.0)
        return dataclasses.replace(self, objective=objective)

    @property
    def left_to_right(self) -> typing.Self:
        """Settings of causal rows, which the encoder and the head predict without the decoder."""
        return dataclasses.replace(self, objective=self.objective.left_to_right, decoder=None)

    def _check_accumulation(self):
        """Raises ConfigError when a batch cannot be cut into microbatches of equal size."""
        sizes = [("Run.batch_size", self.run.batch_size)]
        if self.finetune is not None:  # a run of the grid has its batch size from there
            sizes = [("Grid.batch_size", size) for size in self.finetune.grid.listed("batch_size")]
        for name, size in sizes:
            if size % self.run.accumulate != 0:
                raise ConfigError(
                    f"{name} {size} is not divisible by Run.accumulate {self.run.accumulate}"
                )


# In the order of the fields of `Experiment`. Behind a section are those that lie in it.
SECTIONS = (
    *(Vocabulary, Corpus, Objective, Masking, Encoder, Decoder, Init, Dropout, Compute),
    *(Optimizer, Mesh, Run),
)
FINETUNE_SECTIONS = (Finetune, Grid, CustomTask, Conll)
ALL_SECTIONS = (*SECTIONS, *FINETUNE_SECTIONS)


def sections(experiment: Experiment) -> list[Settings]:
    """Returns all sections of an experiment. A section that lies in another one follows it."""
    parts = []
    for field in dataclasses.fields(experiment):
        part = getattr(experiment, field.name)
        if part is not None:
            inner = (getattr(part, name) for name in type(part).__pydantic_fields__)
            parts += [part, *(value for value in inner if isinstance(value, Settings))]
    return parts


def values(experiment: Experiment) -> dict[str, typing.Any]:
    """Returns {"Section.field": value} of all settings."""
    return {
        f"{type(part).__name__}.{name}": getattr(part, name)
        for part in sections(experiment)
        for name in field_names(type(part))
    }


def differences(old: Experiment, new: Experiment, also_free: tuple[str, ...] = ()) -> list[str]:
    """Returns the settings that differ and may not, as lines `Section.field: old -> new`.

    Free settings may differ, and those named in `also_free` ("Section.field").
    """
    if (old.finetune is None) != (new.finetune is None):
        return ["one pretrains, the other fine-tunes"]
    free = {
        f"{cls.__name__}.{name}" for cls in ALL_SECTIONS for name in field_names(cls, free=True)
    }
    return [line for name, line in changes(old, new).items() if name not in (*free, *also_free)]


def changes(old: Experiment, new: Experiment) -> dict[str, str]:
    """Returns {"Section.field": line `Section.field: old -> new`} of the settings that differ.

    A section that one of them lacks has the value None there.
    """
    before, after = values(old), values(new)
    return {
        name: f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in before | after
        if before.get(name) != after.get(name)
    }
