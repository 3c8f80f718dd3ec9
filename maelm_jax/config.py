"""All settings: one frozen dataclass for each concern. gin binds nothing else.

Each field is declared once, with its type, range, default, unit and meaning. pydantic checks every
new instance. gin_files.py reads gin files into an `Experiment`. docs/configuration.py prints the
settings as a page. This module imports neither JAX nor TensorFlow, so that a wrong setting is
reported within a second.
"""

import dataclasses
import difflib
import functools
import typing

import pydantic

# Prefix of a name in --init_from: the model and vocabulary of that run with fresh weights. This is
# the control of an experiment.
RANDOM = "random:"

# The settings of the paper's decoder: the encoder's width, bidirectional self-attention.
PLAIN_DECODER = {
    "decoder_width": None,
    "decoder_attention": "self",
    "decoder_causal": False,
    "decoder_slots": "all",
}

Positive = typing.Annotated[int, pydantic.Field(ge=1)]
Count = typing.Annotated[int, pydantic.Field(ge=0)]
Seed = typing.Annotated[int, pydantic.Field(ge=0, lt=2**32)]
Axis = Positive | typing.Literal[-1]  # devices on one axis of the mesh
Above0 = typing.Annotated[float, pydantic.Field(gt=0)]
Share = typing.Annotated[float, pydantic.Field(ge=0, le=1)]
ShareBelowOne = typing.Annotated[float, pydantic.Field(ge=0, lt=1)]
Text = typing.Annotated[str, pydantic.Field(min_length=1)]
Family = typing.Literal["bert", "distilbert", "electra", "roberta", "mpnet", "modernbert"]
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


def setting(default, meaning: str, unit: str = "", free: bool = False, part: str = "", **limits):
    """Declares a field of a settings dataclass.

    Args:
        default: The value if no gin file binds the field. A function without arguments is called
            for each new instance.
        meaning: One sentence.
        unit: What the value counts or measures, in the plural.
        free: Whether the value may differ when a run resumes, because it changes no past step.
        part: "encoder" or "decoder" if the value determines the function of that part of the model.
        **limits: Limits of pydantic.Field: ge, gt, le, lt, multiple_of.
    """
    limits |= {"default_factory" if callable(default) else "default": default}
    extra = {"unit": unit, "free": free, "part": part}
    return pydantic.Field(description=meaning, json_schema_extra=extra, **limits)


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
            message = f"{cls.__name__}.{name}: {first['msg']}, got {value[:80]!r}"
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


def field_names(cls: type, part: str = "") -> list[str]:
    """Returns the names of a section's settings, without fields that hold other sections.

    With `part`, these are the settings of that part of the model only (see `setting`).
    """
    return [
        name
        for name, field in cls.__pydantic_fields__.items()
        if field.json_schema_extra and part in ("", field.json_schema_extra["part"])
    ]


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

    sources: dict[Text, Above0] = setting(
        lambda: {"installed_docs": 1.0},
        "Rate of each source: `installed_docs`, `files:GLOB`, `tfds:NAME` or `seqio:NAME`.",
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
    task_modules: tuple[Text, ...] = setting((), "Python modules that register `seqio:` names.")
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
        self.require(len(self.listed("text_field")) > 0, "text_field must name a field")
        known = {*self.rates, f"files:{self.heldout_files}"}
        for source in self.documents:
            is_known = source in known or source.startswith("seqio:")  # a member of a Mixture
            self.require(
                is_known, f"documents: {source!r} is none of {', '.join(sorted(self.rates))}"
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
    def rates(self) -> dict[str, float]:
        """{source: expected share of the rows of a batch}, summing to 1."""
        sources = {f"files:{self.text_files}": 1.0} if self.text_files else self.sources
        total = sum(sources.values())
        return {source: rate / total for source, rate in sources.items()}


@declare
class Masking(Settings):
    """Which positions are masked, and what the encoder sees of them (paper, sections 3, 4.3)."""

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
    encoder_mask_fraction: Share = setting(
        0.0, "Share of the masked positions whose [MASK] enters the encoder: 0 MAE-LM, 1 MLM."
    )
    random_fraction: Share = setting(
        0.0,
        "Share of the masked positions in the encoder that get a random token (BERT: 0.1).",
    )
    keep_fraction: Share = setting(
        0.0,
        "Share of the masked positions in the encoder that keep their token (BERT: 0.1).",
    )
    renumber: bool = setting(False, "True numbers only visible tokens: 0, 1, 2, ...")
    mask_special_tokens: bool = setting(False, "True masks `<s>` and `</s>` as well.")

    def check(self):
        both = "random_fraction and keep_fraction"
        shares = self.random_fraction + self.keep_fraction
        self.require(shares <= 1, f"{both} must not exceed 1 together, got {shares}")
        self.require(
            shares == 0 or self.encoder_mask_fraction > 0,
            f"{both} say what enters the encoder: set encoder_mask_fraction above 0",
        )


@declare
class Model(Settings):
    """The encoder, the decoder above it and the prediction head."""

    layers: int = setting(12, "Layers of the encoder.", "layers", ge=1, part="encoder")
    width: Positive = setting(768, "Size of a hidden state.", "values", part="encoder")
    heads: Positive = setting(12, "Attention heads. They divide `width`.", "heads", part="encoder")
    feed_forward: int = setting(
        3072, "Width of the feed-forward block.", "values", ge=1, part="encoder"
    )
    feed_forward_gate: bool = setting(
        False, "True adds a second linear map: GeGLU.", part="encoder"
    )
    normalization: typing.Literal["post", "pre"] = setting(
        "post",
        "LayerNorm after each sum (`post`, BERT) or before each sublayer (`pre`).",
        part="encoder",
    )
    biases: bool = setting(
        True,
        "False leaves out the biases of layers and normalizations.",
        part="encoder",
    )
    # It is of no part: bidirectional runs go on from the weights of a causal one.
    causal: bool = setting(
        False,
        "True predicts each token from those before it (recipes/causal_phase.gin).",
    )
    decoder_layers: int = setting(
        4,
        "Layers of the decoder. 0 needs all [MASK]s in the encoder.",
        "layers",
        ge=0,
        part="decoder",
    )
    decoder_width: Positive | None = setting(
        None,
        "Size of the decoder. None is `width`.",
        "values",
        part="decoder",
    )
    decoder_attention: typing.Literal["self", "self+cross", "cross"] = setting(
        "self",
        "What it attends to: its own states (self), the encoder's (cross) or both in turn.",
        part="decoder",
    )
    decoder_causal: bool = setting(
        False, "True hides later slots from its self-attention.", part="decoder"
    )
    decoder_slots: typing.Literal["all", "masked"] = setting(
        "all", "Slots that the decoder computes. `masked` needs cross-attention.", part="decoder"
    )
    decoder_refills_mask: bool = setting(
        True,
        "True gives the decoder [MASK] also where the encoder saw a masked slot.",
        part="decoder",
    )
    positions: typing.Literal["learned", "rotary"] = setting(
        "learned",
        "`learned` adds rows of a table, `rotary` turns queries and keys.",
        part="encoder",
    )
    rotary_theta: float = setting(
        10_000.0, "Base of the wavelengths of rotary positions.", gt=1, part="encoder"
    )
    local_attention: Count = setting(
        0,
        "Window of local attention, half to each side. 0 is none.",
        "tokens",
        part="encoder",
    )
    global_every: Positive = setting(
        3,
        "Layers 0, n, 2n, ... have global attention.",
        "layers",
        part="encoder",
    )
    local_rotary_theta: float = setting(
        10_000.0,
        "`rotary_theta` of layers with local attention.",
        gt=1,
        part="encoder",
    )
    max_positions: int = setting(
        512,
        "Longest row; size of a learned table.",
        "tokens",
        ge=1,
        part="encoder",
    )
    token_types: int = setting(
        0,
        "Token types: 1 in RoBERTa, 2 in BERT. 0 is no table.",
        "types",
        ge=0,
        part="encoder",
    )
    relative_buckets: typing.Literal["t5", "reference", "none"] = setting(
        "t5",
        "Relative position bias. `t5` loads into stock MPNet, `none` into stock RoBERTa.",
        part="encoder",
    )
    num_buckets: int = setting(
        32, "Buckets of the bias.", "buckets", ge=8, multiple_of=4, part="encoder"
    )
    max_distance: Positive = setting(
        128, "From here on all pairs share a bucket.", "tokens", part="encoder"
    )
    relative_bias_init: typing.Literal["normal", "local"] = setting(
        "normal", "How the bias starts. `local` is minus the distance times a slope per head."
    )
    decoder_relative_bias: bool = setting(
        False,
        "True gives the decoder a relative bias of its own.",
        part="decoder",
    )
    init_std: float = setting(0.02, "Standard deviation of the initial weights.", gt=0)
    unigram_bias: bool = setting(False, "True starts the head's bias at log frequencies.")
    dropout: ShareBelowOne = setting(0.1, "Dropout of the encoder. The decoder has none.")
    attention_dropout: ShareBelowOne = setting(0.1, "Dropout of the encoder's attention weights.")
    layer_norm_eps: float = setting(
        1e-5, "Added to the variance in layer normalisation.", gt=0, part="encoder"
    )
    family: Family | None = setting(
        None,
        "Stock family: sentence pairs, heads and class of an export. None is the first that fits.",
        part="encoder",
    )
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

    def check(self):
        wrong = f"width {self.width} is not divisible by heads {self.heads}"
        self.require(self.width % self.heads == 0, wrong)
        self.require(
            self.max_distance > self.num_buckets // 2,
            f"max_distance must exceed num_buckets / 2, got {self.max_distance}",
        )
        rotary, head = self.positions == "rotary", self.width // self.heads
        self.require(
            not rotary or self.relative_buckets == "none",
            f"positions = 'rotary' needs relative_buckets = 'none', got {self.relative_buckets!r}",
        )
        self.require(
            not rotary or not self.decoder_relative_bias,
            "positions = 'rotary' needs decoder_relative_bias = False",
        )
        wrong = f"positions = 'rotary' needs heads of an even size, got width / heads = {head}"
        self.require(not rotary or head % 2 == 0, wrong)
        self.require(
            rotary or self.local_attention == 0, "local_attention needs positions = 'rotary'"
        )
        self.require(
            not self.causal or self.decoder_layers == self.local_attention == 0,
            "causal needs decoder_layers = 0 and local_attention = 0",
        )
        self._check_decoder()

    def _check_decoder(self):
        self.require(
            self.decoder_layers > 0 or self.has_plain_decoder,
            "decoder_layers = 0 needs the defaults of decoder_width, decoder_attention, "
            "decoder_causal and decoder_slots",
        )
        self.require(
            self.decoder_slots == "all" or "cross" in self.decoder_attention,
            "decoder_slots = 'masked' needs decoder_attention with 'cross'",
        )
        self.require(
            not self.decoder_causal or "self" in self.decoder_attention,
            "decoder_causal needs decoder_attention with 'self'",
        )

    def check_decoder_width(self):
        """Raises ConfigError if heads of the encoder's size do not fill the decoder's width."""
        width, head = self.decoder_width or 0, self.width // self.heads
        wrong = f"decoder_width {width} is not a multiple of the encoder's head size {head}"
        self.require(width % head == 0, wrong)

    @property
    def feed_forward_kernels(self) -> int:
        """The number of matrices in a feed-forward block."""
        return 3 if self.feed_forward_gate else 2

    @property
    def has_plain_decoder(self) -> bool:
        """Whether the decoder is the paper's."""
        return all(getattr(self, name) == value for name, value in PLAIN_DECODER.items())

    @property
    def without_decoder(self) -> "Model":
        """The model of the encoder alone. The settings of its decoder are those of the paper's."""
        return dataclasses.replace(
            self, decoder_layers=0, decoder_relative_bias=False, **PLAIN_DECODER
        )

    @property
    def decoder(self) -> "Model":
        """Model with the sizes of the decoder, or with those of the encoder if there is none.

        No layer of a decoder has local attention.
        """
        width = self.decoder_width or self.width
        heads = width * self.heads // self.width
        feed_forward = max(width * self.feed_forward // self.width, 1)
        sizes = {"width": width, "heads": heads, "feed_forward": feed_forward}
        layers = self.decoder_layers or self.layers
        return dataclasses.replace(self, layers=layers, local_attention=0, **sizes)


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
    schedule: typing.Literal["linear", "wsd", "decay"] = setting(
        "linear",
        "After the warm-up, the rate falls linearly to 0 over all other steps (`linear`) or "
        "the last ones (`wsd`). `decay` falls from the rate of Run.continue_from to 0 as 1 - "
        "sqrt(share of the steps done).",
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
    eval_every: Positive = setting(5_000, "Steps between evaluations.", "steps", free=True)
    eval_rows: Positive = setting(4096, "Size of an evaluation, the same each time.", "rows")
    rank_every: Count = setting(
        5_000, "Steps between effective ranks. 0 is never.", "steps", free=True
    )
    checkpoint_every: Positive = setting(5_000, "Steps between checkpoints.", "steps", free=True)
    keep_every: Positive | None = setting(
        None,
        "Checkpoints at its multiples are kept, besides the newest 3.",
        "steps",
        free=True,
    )

    def check(self):
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
    """All settings of one run. `finetune` is None in pretraining."""

    vocabulary: Vocabulary = dataclasses.field(default_factory=Vocabulary)
    corpus: Corpus = dataclasses.field(default_factory=Corpus)
    masking: Masking = dataclasses.field(default_factory=Masking)
    model: Model = dataclasses.field(default_factory=Model)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    run: Run = dataclasses.field(default_factory=Run)
    finetune: Finetune | None = None

    def __post_init__(self):
        length, positions = self.corpus.sequence_length, self.model.max_positions
        if not self.run.init_from:  # else encoders/adoption.py checks it with that encoder
            self.model.check_decoder_width()
            if length > positions:
                raise ConfigError(
                    f"Corpus.sequence_length {length} is longer than the position table: lower it "
                    f"to {positions}, or set Model.max_positions to {length} or more"
                )
        if self.model.decoder_layers == 0 and self.masking.encoder_mask_fraction < 1:
            raise ConfigError(
                "Model.decoder_layers = 0 needs Masking.encoder_mask_fraction = 1: without a "
                "decoder, no part of the model predicts a dropped position. Set the fraction to 1, "
                "or decoder_layers above 0"
            )
        if self.masking.renumber and self.model.local_attention:
            raise ConfigError(
                "Masking.renumber needs Model.local_attention = 0, which takes tokens to be at "
                "most as many slots apart as positions"
            )
        for name in ("rate", "heldout_rate"):
            rate = getattr(self.masking, name)
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
        if self.optimizer.schedule == "decay" and not self.run.continue_from:
            raise ConfigError(
                "Optimizer.schedule = 'decay' needs Run.continue_from, the run that it goes on from"
            )
        self._check_accumulation()

    @property
    def evaluated(self) -> typing.Self:
        """Settings of evaluations and rank measurements. Their mask rate is the held-out one."""
        rate = self.masking.heldout_rate or self.masking.rate
        masking = dataclasses.replace(self.masking, rate=rate, heldout_rate=None)
        return dataclasses.replace(self, masking=masking)

    @property
    def visible_mask_fraction(self) -> float:
        """Share of the masked positions that the encoder may read as [MASK].

        It is 0 if a random or the same token stands at each of them and a decoder predicts them.
        """
        masking = self.masking
        is_replaced = masking.random_fraction + masking.keep_fraction == 1
        return 0.0 if is_replaced and self.model.decoder_layers else masking.encoder_mask_fraction

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


SECTIONS = (Vocabulary, Corpus, Masking, Model, Optimizer, Mesh, Run)
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
        f"{cls.__name__}.{name}"
        for cls in ALL_SECTIONS
        for name in field_names(cls)
        if cls.__pydantic_fields__[name].json_schema_extra["free"]
    }
    after = values(new)
    return [
        f"{name}: {value!r} -> {after[name]!r}"
        for name, value in values(old).items()
        if value != after[name] and name not in (*free, *also_free)
    ]
