"""Every setting there is: one frozen dataclass per concern, the only things gin binds, checked as they are made (settings.py).

This module imports neither JAX nor TensorFlow, so a wrong setting is reported in a second. gin_files.py reads gin files into an `Experiment`.
"""

import dataclasses
import typing

import gin

from maelm_jax.settings import ConfigError as ConfigError
from maelm_jax.settings import RunError as RunError
from maelm_jax.settings import Settings


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Vocabulary(Settings):
    """How text becomes ids."""

    file: str | None = None  # a SentencePiece .model or a Hugging Face tokenizer.json; None trains one on the corpus
    size: int = 32768  # ids in all, <s> <pad> </s> <unk> and <mask> included
    cased: bool = False
    sample_megabytes: float = 64.0  # text that the SentencePiece trainer sees, picked by document hash

    def check(self):
        self.require(self.size >= 300, f"size must be at least 300, got {self.size}")
        self.require(self.sample_megabytes > 0, f"sample_megabytes must be above 0, got {self.sample_megabytes}")


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Corpus(Settings):
    """Where text comes from and how it is cut into rows.

    A source is one of `installed_docs`; `files:GLOB`; `tfds:NAME` (TFDS, as in tfds:wikipedia/20230601.en); `seqio:NAME` (a registered
    Task or Mixture, see `task_modules`). `text_files`, when set, takes the place of `sources`.
    """

    sources: dict[str, float] = dataclasses.field(default_factory=lambda: {"installed_docs": 1.0})  # source -> rate in the mixture
    text_files: str | None = None  # a glob of .txt/.jsonl files, each also .gz or .xz: when set, the corpus
    json_field: str = "text"  # the field of a .jsonl record that holds the document
    task_modules: tuple[str, ...] = ()  # modules to import so that seqio: names are registered
    tfds_data_dir: str | None = None  # where TFDS datasets lie; None is TFDS's own default
    sequence_length: int = 512  # tokens in a row
    heldout_fraction: float = 0.005  # share of documents, by hash of their text, kept for evaluation
    rows_dir: str = "rows"  # where prepared rows are kept, one folder per (source, vocabulary, length)
    processes: int = 0  # tokenising processes; 0 is one per core

    def check(self):
        self.require(self.sequence_length >= 8, f"sequence_length must be at least 8, got {self.sequence_length}")
        self.require(0 < self.heldout_fraction < 0.5, f"heldout_fraction must lie in (0, 0.5), got {self.heldout_fraction}")
        self.require(len(self.sources) > 0, "sources must name at least one source")
        for source, rate in self.sources.items():
            self.require(rate > 0, f"sources: the rate of {source!r} must be above 0, got {rate}")
            known = source == "installed_docs" or source.split(":", 1)[0] in ("files", "tfds", "seqio") and ":" in source
            self.require(known, f"sources: {source!r} is none of installed_docs, files:GLOB, tfds:NAME, seqio:NAME")

    @property
    def rates(self) -> dict[str, float]:
        """Source -> share of the rows of a batch (expected), summing to 1."""
        sources = {f"files:{self.text_files}": 1.0} if self.text_files else self.sources
        total = sum(sources.values())
        return {source: rate / total for source, rate in sources.items()}


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Masking(Settings):
    """Which positions are predicted, which of them the encoder reads (paper sections 3 and 4.3), and as what."""

    rate: float = 0.15  # share of a row's tokens that are selected
    unit: typing.Literal["token", "word", "span"] = "token"  # what is selected as a whole: words of the text, or runs of 4.5 tokens on average
    encoder_mask_fraction: float = 0.0  # delta: share of the selected positions that enter the encoder, as [MASK]; 0 MAE-LM, 1 MLM
    random_fraction: float = 0.0  # of those that enter: share that stands there as a random token instead (BERT: 0.1)
    keep_fraction: float = 0.0  # of those that enter: share that stands there as it is (BERT: 0.1)
    renumber: bool = False  # True: the encoder counts visible tokens 0, 1, 2, ... instead of using their positions in the text
    mask_special_tokens: bool = False  # True selects <s> and </s> too, as the reference does
    compact: bool = True  # False keeps dropped positions in the row and hides them by attention mask: same function, slower, a check

    def check(self):
        self.require(0 < self.rate < 1, f"rate must lie in (0, 1), got {self.rate}")
        self.require(0 <= self.encoder_mask_fraction <= 1, f"encoder_mask_fraction must lie in [0, 1], got {self.encoder_mask_fraction}")
        for name in ("random_fraction", "keep_fraction"):
            self.require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], got {getattr(self, name)}")
        shares = self.random_fraction + self.keep_fraction
        self.require(shares <= 1, f"random_fraction and keep_fraction must not exceed 1 together, got {shares}")
        entered = shares == 0 or self.encoder_mask_fraction > 0
        self.require(entered, "random_fraction and keep_fraction say what enters the encoder: set encoder_mask_fraction above 0")


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Model(Settings):
    """The encoder, the decoder above it and the prediction head."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    feed_forward: int = 3072
    decoder_layers: int = 4  # 0: the head reads the encoder directly, which needs every [MASK] in it (MLM)
    decoder_width: int | None = None  # None is the encoder's; its heads are as wide as the encoder's, its feed_forward in proportion
    decoder_attention: typing.Literal["self", "self+cross", "cross"] = "self"  # cross: to the encoder's states
    decoder_causal: bool = False  # True: its self-attention sees earlier slots only
    decoder_slots: typing.Literal["all", "masked"] = "all"  # masked: it runs on the predicted slots only, and needs cross-attention
    max_positions: int = 512  # rows of the position tables
    relative_buckets: typing.Literal["t5", "reference", "none"] = "t5"  # t5 loads into stock MPNet, none into stock RoBERTa
    num_buckets: int = 32
    max_distance: int = 128
    relative_bias_init: typing.Literal["normal", "local"] = "normal"  # local: minus distance times a slope that halves from head to head
    decoder_relative_bias: bool = False  # True gives the decoder a table of its own (the paper has none there)
    init_std: float = 0.02
    unigram_bias: bool = False  # True: the head's bias starts at the log of the tokens' frequencies, so that nothing else has to learn them
    dropout: float = 0.1  # encoder only: the decoder has none
    attention_dropout: float = 0.1  # encoder only
    layer_norm_eps: float = 1e-5  # the reference's; other encoders that a run starts from have their own
    dtype: typing.Literal["float32", "bfloat16"] = "float32"  # of the computation; parameters are float32
    rematerialise: bool = False  # recompute each layer in the backward pass instead of keeping its activations
    logit_tile: int | None = None  # predicted tokens of a microbatch whose logits (one per id of the vocabulary) exist at a time; None: all

    def check(self):
        for name in ("layers", "width", "heads", "feed_forward", "max_positions"):
            self.require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        self.require(self.width % self.heads == 0, f"width {self.width} is not divisible by heads {self.heads}")
        self.require(self.decoder_layers >= 0, f"decoder_layers must be 0 or more, got {self.decoder_layers}")
        self.require(self.num_buckets >= 8 and self.num_buckets % 4 == 0, f"num_buckets must be a multiple of 4, at least 8, got {self.num_buckets}")
        self.require(self.max_distance > self.num_buckets // 2, f"max_distance must exceed num_buckets / 2, got {self.max_distance}")
        for name in ("dropout", "attention_dropout"):
            self.require(0 <= getattr(self, name) < 1, f"{name} must lie in [0, 1), got {getattr(self, name)}")
        self.require(self.init_std > 0, f"init_std must be above 0, got {self.init_std}")
        self.require(self.layer_norm_eps > 0, f"layer_norm_eps must be above 0, got {self.layer_norm_eps}")
        self.require(self.logit_tile is None or self.logit_tile > 0, f"logit_tile must be above 0, got {self.logit_tile}")
        relative = self.relative_buckets != "none"
        self.require(relative or not self.decoder_relative_bias, "decoder_relative_bias needs relative_buckets other than 'none'")
        self.require(
            self.decoder_layers > 0 or self.has_plain_decoder,
            "decoder_layers is 0, yet decoder_width, _attention, _causal or _slots asks for a decoder",
        )
        attends = self.decoder_attention
        self.require(self.decoder_slots == "all" or "cross" in attends, "decoder_slots = 'masked' needs decoder_attention with 'cross'")
        self.require(not self.decoder_causal or "self" in attends, "decoder_causal needs decoder_attention with 'self'")
        size, head = self.decoder_width, self.width // self.heads
        fits = size is None or size > 0 and size % head == 0
        self.require(fits, f"decoder_width {size} is not a multiple of the encoder's head size {head}")

    @property
    def has_plain_decoder(self) -> bool:
        """Whether the decoder (if there is one) is the paper's: as wide as the encoder, self-attention over every slot, both ways."""
        return (self.decoder_width, self.decoder_attention, self.decoder_causal, self.decoder_slots) == (None, "self", False, "all")

    @property
    def decoder(self) -> "Model":
        """The decoder's sizes as a Model: what its layers are built from. Without a decoder, the encoder's."""
        width = self.decoder_width or self.width
        scaled = {"heads": width * self.heads // self.width, "feed_forward": width * self.feed_forward // self.width}
        return dataclasses.replace(self, layers=self.decoder_layers or self.layers, width=width, **scaled)


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Optimizer(Settings):
    """AdamW as the reference sets it; linear warm-up, then linear decay to 0 at the last step."""

    learning_rate: float = 5e-4  # at its peak
    warmup_steps: int = 10_000
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-6
    weight_decay: float = 0.01  # decoupled, on every parameter
    clip_norm: float = 2.0  # of the whole gradient; 0 switches clipping off

    def check(self):
        self.require(self.learning_rate > 0, f"learning_rate must be above 0, got {self.learning_rate}")
        self.require(self.warmup_steps >= 0, f"warmup_steps must be 0 or more, got {self.warmup_steps}")
        self.require(self.clip_norm >= 0, f"clip_norm must be 0 or more, got {self.clip_norm}")


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Mesh(Settings):
    """How devices are divided; the product must be the number of devices. -1 (one axis at most) takes what the others leave."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def check(self):
        sizes = (self.data, self.fsdp, self.tensor)
        self.require(all(size == -1 or size > 0 for size in sizes), f"sizes must be positive or -1, got {sizes}")
        self.require(sizes.count(-1) <= 1, f"sizes can hold one -1 at most, got {sizes}")


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Run(Settings):
    """The length of the run and what it leaves behind."""

    train_steps: int = 125_000
    batch_size: int = 2048  # rows per optimiser step, over all devices and hosts
    accumulate: int = 1  # microbatches a step is computed in
    seed: int = 0
    deterministic: bool = False  # on GPU: the same losses each time, by slower operations (CPU and TPU: always)
    init_from: str | None = None  # what the run starts from: a workdir, an exported or a stock MPNet/RoBERTa folder, a reference .pt or .npz
    log_every: int = 100
    eval_every: int = 5_000
    eval_rows: int = 4096  # held-out rows per evaluation: the same rows with the same masks each time
    rank_every: int = 5_000  # steps between measurements of the effective rank (analysis/watch.py); 0 switches them off
    checkpoint_every: int = 5_000
    checkpoint_minutes: float | None = None  # a checkpoint also when so many minutes have passed since the last one
    keep_checkpoints: int = 3  # the newest N
    keep_every: int | None = None  # and every checkpoint whose step is a multiple of this

    def check(self):
        cadence = ("log_every", "eval_every", "eval_rows", "checkpoint_every", "keep_checkpoints")
        for name in ("train_steps", "batch_size", "accumulate", *cadence):
            self.require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        self.require(self.rank_every >= 0, f"rank_every must be 0 or more, got {self.rank_every}")
        minutes = self.checkpoint_minutes
        self.require(minutes is None or minutes > 0, f"checkpoint_minutes must be above 0, got {minutes}")
        self.require(self.batch_size % self.accumulate == 0, f"batch_size {self.batch_size} is not divisible by accumulate {self.accumulate}")


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Finetune(Settings):
    """Fine-tuning on labelled tasks (paper, appendix on hyper-parameters). Where a field takes a list, every combination is a cell of the grid.

    The optimiser's other settings are `Optimizer`'s, cadence and seed `Run`'s; both are filled in for each cell.
    """

    tasks: str | tuple[str, ...] = ()  # of cola sst2 mrpc stsb qqp mnli qnli rte wnli squad1 squad2 own
    init_from: str | None = None  # where the encoder is from: --init_from
    data_dir: str | None = None  # the folder of GLUE's folders or of SQuAD's files, or the one above; None reads TFDS
    seeds: int | tuple[int, ...] = 1
    batch_size: int | tuple[int, ...] = 32
    learning_rate: float | tuple[float, ...] = 3e-5
    epochs: int | tuple[int, ...] = 3
    small_task_epochs: int | tuple[int, ...] = ()  # tried as well where there are fewer than 10,000 training examples
    warmup: float | tuple[float, ...] = 0.06  # share of all steps
    evaluations: int = 2  # an epoch
    eval_batch_size: int = 64
    max_length: int = 512  # tokens; never more than the encoder's positions
    train_examples: int | None = None  # train on a sample of this size, the same for every seed; None: on all
    question_length: int = 64  # SQuAD: tokens of a question; the rest is cut off
    stride: int = 128  # SQuAD: tokens from the start of one window to the start of the next; at most half a window
    answer_length: int = 30  # SQuAD: tokens of an answer at most
    train_file: str | None = None  # own: tab-separated, with a header line, quotes taken literally
    dev_file: str | None = None  # own: as train_file
    columns: tuple[str, ...] = ("sentence",)  # own: the columns of the text, one or two
    label: str = "label"  # own: the column of the label
    labels: tuple[str, ...] = ()  # own: every label there is
    dev_share: float = 0.0  # SQuAD without a training file: share of the dev file's articles that are evaluated, the others train

    def check(self):
        for name in ("batch_size", "learning_rate", "epochs", "small_task_epochs", "warmup", "seeds", "tasks"):
            values = self.listed(name)
            self.require(len(set(values)) == len(values), f"{name} names a value twice: {values}")
            self.require(values or name in ("small_task_epochs", "tasks"), f"{name} must hold a value")
            if name in ("batch_size", "learning_rate", "epochs", "small_task_epochs"):
                self.require(all(value > 0 for value in values), f"{name} must be above 0, got {values}")
        self.require(all(0 <= value < 1 for value in self.listed("warmup")), f"warmup must lie in [0, 1), got {self.warmup}")
        for name in ("evaluations", "eval_batch_size", "stride", "answer_length"):
            self.require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        self.require(self.train_examples is None or self.train_examples > 0, f"train_examples must be above 0, got {self.train_examples}")
        self.require(0 <= self.dev_share < 1, f"dev_share must lie in [0, 1), got {self.dev_share}")
        if "own" in self.listed("tasks"):
            for name in ("train_file", "dev_file"):
                self.require(getattr(self, name) is not None, f"the task own needs {name}")
            self.require(len(self.columns) in (1, 2), f"columns must name one or two columns, got {self.columns}")
            self.require(len(set(self.labels)) == len(self.labels) > 1, f"labels must name two classes or more, each once, got {self.labels}")

    def listed(self, name: str) -> tuple:
        """A field as a tuple, whether it was given as one value or as a list."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All settings of one run; `finetune` where it is a fine-tuned one."""

    vocabulary: Vocabulary
    corpus: Corpus
    masking: Masking
    model: Model
    optimizer: Optimizer
    mesh: Mesh
    run: Run
    finetune: Finetune | None = None

    def __post_init__(self):
        length, positions = self.corpus.sequence_length, self.model.max_positions
        if length > positions:
            raise ConfigError(f"Corpus.sequence_length {length} is longer than the position table: set Model.max_positions to {length} or more")
        if self.model.decoder_layers == 0 and self.masking.encoder_mask_fraction < 1:
            raise ConfigError(
                "Model.decoder_layers = 0 needs Masking.encoder_mask_fraction = 1: without a decoder nothing stands at a dropped position"
            )


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """What model and masks must know of a vocabulary: the ids with a meaning of their own (the rest is text), and where words go on."""

    bos: int  # <s>, at the start of every segment
    pad: int
    eos: int  # </s>, after every line
    unk: int
    mask: int
    continues_word: tuple[bool, ...] = ()  # of every id; random tokens and whole words need it

    @classmethod
    def of_size(cls, size: int) -> "SpecialIds":
        """Those of a vocabulary trained here (data/vocabulary.py), where none is at hand: every id a word of its own."""
        return cls(0, 1, 2, 3, size - 1, (False,) * size)

    @property
    def never_masked(self) -> tuple[int, ...]:
        return (self.bos, self.pad, self.eos)


SECTIONS = (Vocabulary, Corpus, Masking, Model, Optimizer, Mesh, Run)
# What may differ when a workdir is resumed: none of it changes a past step, nor, but for `train_steps` (the schedule), which numbers a coming step
# computes (mesh, memory and microbatches: up to rounding). training/resume.py says and records what differs.
FREE_ON_RESUME = (
    "Mesh.",
    "Model.rematerialise",
    "Model.logit_tile",
    "Run.train_steps",
    "Run.accumulate",
    "Run.log_every",
    "Run.eval_every",
    "Run.rank_every",
    "Run.checkpoint_",
    "Run.keep_",
    "Corpus.processes",
    "Corpus.rows_dir",
    "Run.init_from",
    "Finetune.data_dir",
    "Finetune.train_file",
    "Finetune.dev_file",
    "Finetune.eval_batch_size",
)


def differences(old: Experiment, new: Experiment, free: tuple[str, ...] = FREE_ON_RESUME) -> list[str]:
    """Lines `Section.field: old -> new` for what differs. Names that start as one of `free` are left out: by default, what may differ on resume."""
    lines = []
    for field in dataclasses.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before is None or after is None:
            lines += [f"{field.name}: {'there' if before else 'not there'} -> {'there' if after else 'not there'}"] * (before != after)
            continue
        for item in dataclasses.fields(before):
            name = f"{type(before).__name__}.{item.name}"
            a, b = getattr(before, item.name), getattr(after, item.name)
            if a != b and not name.startswith(free):
                lines.append(f"{name}: {a!r} -> {b!r}")
    return lines
