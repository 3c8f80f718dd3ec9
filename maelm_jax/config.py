"""All settings, one frozen dataclass for each concern. gin binds nothing else.

settings.py checks every field against its declaration here. `python -m maelm_jax.config` prints
docs/configuration.md. gin_files.py reads gin files into an `Experiment`. This module imports
neither JAX nor TensorFlow, so that a wrong setting is reported within a second.
config_finetune.py has the settings of fine-tuning, config_optimizer.py those of the optimizer,
config_run.py those of the length of a run.
"""

import dataclasses
import sys
import typing

from maelm_jax import config_finetune
from maelm_jax.config_finetune import Conll as Conll
from maelm_jax.config_finetune import CustomTask as CustomTask
from maelm_jax.config_finetune import Finetune
from maelm_jax.config_finetune import Grid as Grid
from maelm_jax.config_finetune import Squad as Squad
from maelm_jax.config_optimizer import Optimizer as Optimizer
from maelm_jax.config_run import Run as Run
from maelm_jax.settings import (
    Axis,
    Count,
    Positive,
    Rate,
    Settings,
    Share,
    ShareBelowOne,
    ShareInside,
    Text,
    Width,
    declare,
    field_names,
    page,
    setting,
)
from maelm_jax.settings import ConfigError as ConfigError
from maelm_jax.settings import RunError as RunError
from maelm_jax.special_ids import SpecialIds as SpecialIds

Family = typing.Literal["bert", "distilbert", "electra", "roberta", "mpnet", "modernbert"]


@declare
class Vocabulary(Settings):
    """How text becomes ids."""

    file: Text | None = setting(
        None, "SentencePiece .model or Hugging Face tokenizer.json. None trains one on the corpus.")
    size: int = setting(32768, "Ids, special tokens included.", "ids", ge=300, le=2**24)
    cased: bool = setting(False, "True keeps upper case.")
    sample_megabytes: float = setting(
        64.0, "Text to train the vocabulary on, picked by document hash from 8 times as much.",
        "MB", gt=0, le=1e6)


@declare
class Corpus(Settings):
    """Where text comes from and how it is cut into rows. A row is one packed training sequence."""

    sources: dict[Text, Rate] = setting(
        lambda: {"installed_docs": 1.0}, "Rate of each source in the mixture. A source is "
        "`installed_docs`, `files:GLOB`, `tfds:NAME` or `seqio:NAME`.")
    text_files: Text | None = setting(
        None, "Glob of files of text, also gs:// or s3:// (docs/data.md). It replaces `sources`.")
    json_field: Text = setting("text", "Field of a .jsonl record that holds the document.")
    text_column: Text = setting(
        "text", "Column of .parquet and .arrow files, feature of TFRecord and ArrayRecord files.")
    task_modules: tuple[Text, ...] = setting(
        (), "Python modules to import, so that `seqio:` names are registered.")
    tfds_data_dir: Text | None = setting(None, "Folder of TFDS datasets. None is TFDS's own.")
    sequence_length: int = setting(512, "Length of a row.", "tokens", ge=8, le=2**20)
    heldout_fraction: float = setting(
        0.005, "Share of documents, by hash of their text, kept for evaluation.", gt=0, lt=0.5)
    minimum_characters: int = setting(
        0, "Shorter documents are left out.", "characters", ge=0, le=10**9)
    document_filter: Text | None = setting(
        None, "Python function `module:function`. Leaves out documents for which it is False.")
    deduplicate: bool = setting(
        False, "True leaves out a document whose exact text came before in its source.")
    skip_bad_files: bool = setting(
        False, "True leaves out files that cannot be read. False ends the command.")
    rows_dir: Text = setting("rows", "Folder of prepared rows, shared by runs.")
    shuffle_shards: int = setting(
        0, "Files whose rows are shuffled together. 0 is all of a source.", ge=0, le=10**6)
    cache_gb: float = setting(
        0.0, "Memory for rows read in place. 0 copies those in a bucket.", "GB", ge=0, le=1e5)
    processes: int = setting(0, "Tokenising processes. 0 is one for each core.", ge=0, le=4096)

    def check(self):
        self.require(len(self.sources) > 0, "sources must name at least one source")
        for source in self.sources:
            kind, _, name = source.partition(":")
            named = kind in ("files", "tfds", "seqio") and name != ""
            known = source == "installed_docs" or named
            kinds = "installed_docs, files:GLOB, tfds:NAME, seqio:NAME"
            self.require(known, f"sources: {source!r} is none of {kinds}")
        module, _, function = (self.document_filter or "module:function").partition(":")
        self.require(
            all(part.isidentifier() for part in (*module.split("."), function)),
            f"document_filter must be module:function, got {self.document_filter!r}")

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
        0.15,
        "Masked share of a row's tokens, `<s>` and `</s>` counted; of text alone a bit more.",
        gt=0, lt=1)
    rate_plateaus: tuple[tuple[ShareBelowOne, ShareInside], ...] = setting(
        (), "Rates in training: (share of the steps done, `rate` from there on), the first at 0. "
        "Evaluations keep `rate`.")
    unit: typing.Literal["token", "word", "span"] = setting(
        "token", "What is masked as a whole. A span is 4.5 tokens long on average.")
    encoder_mask_fraction: Share = setting(
        0.0, "Share of the masked positions whose [MASK] enters the encoder: 0 MAE-LM, 1 MLM.")
    random_fraction: Share = setting(0.0, "Share of these that becomes a random token (BERT: 0.1).")
    keep_fraction: Share = setting(0.0, "Share of these that keeps its token (BERT: 0.1).")
    renumber: bool = setting(
        False, "True gives the encoder positions 0, 1, 2, ... of visible tokens only.")
    mask_special_tokens: bool = setting(False, "True masks `<s>` and `</s>` as well.")
    compact: bool = setting(
        True, "False hides dropped positions by attention mask. Same function, slower: a check.")

    def check(self):
        starts = [start for start, _ in self.rate_plateaus]
        self.require(
            starts == sorted(set(starts)) and starts[:1] in ([], [0]),
            f"rate_plateaus must begin at 0 and ascend, got {self.rate_plateaus}")
        both = "random_fraction and keep_fraction"
        shares = self.random_fraction + self.keep_fraction
        self.require(shares <= 1, f"{both} must not exceed 1 together, got {shares}")
        self.require(
            shares == 0 or self.encoder_mask_fraction > 0,
            f"{both} say what enters the encoder: set encoder_mask_fraction above 0")


@declare
class Model(Settings):
    """The encoder, the decoder above it and the prediction head."""

    layers: int = setting(12, "Layers of the encoder.", "layers", ge=1, le=1000)
    width: Width = setting(768, "Size of a hidden state.", "values")
    heads: Width = setting(12, "Attention heads. They divide `width`.", "heads")
    feed_forward: int = setting(3072, "Width of the feed-forward block.", "values", ge=1, le=2**24)
    feed_forward_gate: bool = setting(
        False, "True multiplies the activation by a second linear map: GeGLU.")
    normalization: typing.Literal["post", "pre"] = setting(
        "post", "Where LayerNorm stands: `post` after each sum (BERT), `pre` before each sublayer.")
    biases: bool = setting(
        True, "False leaves the biases out of the layers' linear maps and all normalizations.")
    decoder_layers: int = setting(
        4, "Layers of the decoder. 0 needs all [MASK]s in the encoder.", "layers", ge=0, le=1000)
    decoder_width: Width | None = setting(
        None, "Width of the decoder, with heads of the encoder's size. None is `width`.", "values")
    decoder_attention: typing.Literal["self", "self+cross", "cross"] = setting(
        "self", "What the decoder attends to. Cross is the encoder's states.")
    decoder_causal: bool = setting(False, "True hides later slots from its self-attention.")
    decoder_slots: typing.Literal["all", "masked"] = setting(
        "all", "Slots that the decoder computes. `masked` needs cross-attention.")
    decoder_refills_mask: bool = setting(
        True, "True gives the decoder [MASK] also where the encoder saw a masked slot.")
    positions: typing.Literal["learned", "rotary"] = setting(
        "learned", "Positions: `learned` adds rows of a table, `rotary` turns queries and keys.")
    rotary_theta: float = setting(
        10_000.0, "Base of the wavelengths of rotary positions.", gt=1, le=1e9)
    local_attention: Count = setting(
        0, "Window of layers with local attention, half to each side. 0: no such layers.", "tokens")
    global_every: Positive = setting(
        3, "With local attention, layers 0, n, 2n, ... attend to the whole segment.", "layers")
    local_rotary_theta: float = setting(
        10_000.0, "Base in layers with local attention (`rotary_theta`).", gt=1, le=1e9)
    max_positions: int = setting(
        512, "The longest row that fits; rows of a learned table.", "tokens", ge=1, le=2**20)
    token_types: int = setting(
        0, "Rows of the token-type table: 1 in RoBERTa, 2 in BERT. 0 is no table.",
        "types", ge=0, le=16)
    relative_buckets: typing.Literal["t5", "reference", "none"] = setting(
        "t5", "Relative position bias. `t5` loads into stock MPNet, `none` into stock RoBERTa.")
    num_buckets: int = setting(32, "Buckets of the bias.", "buckets", ge=8, le=2**20, multiple_of=4)
    max_distance: Positive = setting(128, "From here on all pairs share a bucket.", "tokens")
    relative_bias_init: typing.Literal["normal", "local"] = setting(
        "normal", "How the bias starts. `local` is minus the distance times a slope per head.")
    decoder_relative_bias: bool = setting(
        False, "True gives the decoder a relative bias of its own. The paper has none.")
    init_std: float = setting(0.02, "Standard deviation of the initial weights.", gt=0, le=100)
    unigram_bias: bool = setting(False, "True starts the head's bias at log frequencies.")
    dropout: ShareBelowOne = setting(0.1, "Dropout of the encoder. The decoder has none.")
    attention_dropout: ShareBelowOne = setting(0.1, "Dropout of the encoder's attention weights.")
    layer_norm_eps: float = setting(
        1e-5, "Added to the variance in layer normalisation.", ge=1e-30, le=1)
    family: Family | None = setting(
        None, "Stock family: decides sentence pairs, heads and the class of an export. "
        "None is the first that fits.")
    dtype: typing.Literal["float32", "bfloat16"] = setting(
        "float32", "Type of the computation. Parameters are float32.")
    attention_backend: typing.Literal["auto", "xla", "cudnn", "pallas_tpu", "pallas_gpu"] = setting(
        "auto", "What computes attention. `auto` is a fused kernel where the device has one.")
    rematerialise: bool = setting(False, "True recomputes layers in the backward pass.")
    logit_tile: Positive | None = setting(
        None, "Masked tokens whose logits exist at a time. None is all of them.", "tokens")

    def check(self):
        wrong = f"width {self.width} is not divisible by heads {self.heads}"
        self.require(self.width % self.heads == 0, wrong)
        self.require(
            self.max_distance > self.num_buckets // 2,
            f"max_distance must exceed num_buckets / 2, got {self.max_distance}")
        self.require(
            self.relative_buckets != "none" or not self.decoder_relative_bias,
            "decoder_relative_bias needs relative_buckets other than 'none'")
        rotary, head = self.positions == "rotary", self.width // self.heads
        self.require(
            not rotary or self.relative_buckets == "none",
            f"positions = 'rotary' needs relative_buckets = 'none', got {self.relative_buckets!r}")
        wrong = f"positions = 'rotary' needs heads of an even size, got width / heads = {head}"
        self.require(not rotary or head % 2 == 0, wrong)
        self.require(
            rotary or self.local_attention == 0, "local_attention needs positions = 'rotary'")
        self._check_decoder()

    def _check_decoder(self):
        self.require(
            self.decoder_layers > 0 or self.has_plain_decoder,
            "decoder_layers is 0, yet a setting of the decoder asks for a decoder")
        self.require(
            self.decoder_slots == "all" or "cross" in self.decoder_attention,
            "decoder_slots = 'masked' needs decoder_attention with 'cross'")
        self.require(
            not self.decoder_causal or "self" in self.decoder_attention,
            "decoder_causal needs decoder_attention with 'self'")
        width, head = self.decoder_width or 0, self.width // self.heads
        wrong = f"decoder_width {width} is not a multiple of the encoder's head size {head}"
        self.require(width % head == 0, wrong)

    @property
    def feed_forward_kernels(self) -> int:
        """The matrices of a feed-forward block."""
        return 3 if self.feed_forward_gate else 2

    @property
    def has_bert_blocks(self) -> bool:
        """Whether the layers are BERT's: post-LN, biases, no gate, no rotary positions."""
        kind = (self.normalization, self.positions, self.feed_forward_gate, self.biases)
        return kind == ("post", "learned", False, True)

    @property
    def has_plain_decoder(self) -> bool:
        """Whether the decoder is the paper's: the encoder's width, bidirectional self-attention."""
        kind = (self.decoder_attention, self.decoder_causal, self.decoder_slots)
        return self.decoder_width is None and kind == ("self", False, "all")

    @property
    def decoder(self) -> "Model":
        """Model with the decoder's sizes. Its layer count is the encoder's without a decoder.

        No layer of a decoder has local attention.
        """
        width = self.decoder_width or self.width
        heads = width * self.heads // self.width
        feed_forward = max(width * self.feed_forward // self.width, 1)
        sizes = {"width": width, "heads": heads, "feed_forward": feed_forward}
        layers = self.decoder_layers or self.layers
        return dataclasses.replace(self, layers=layers, local_attention=0, **sizes)


@declare
class Mesh(Settings):
    """How devices are divided. The product is the number of devices."""

    data: Axis = setting(
        -1, "Data parallelism. One axis can be -1: it takes the devices that are left.", "devices")
    fsdp: Axis = setting(1, "Data parallelism with sharded parameters and moments.", "devices")
    tensor: Axis = setting(1, "Tensor parallelism.", "devices")

    def check(self):
        sizes = (self.data, self.fsdp, self.tensor)
        self.require(sizes.count(-1) <= 1, f"sizes can hold one -1 at most, got {sizes}")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All settings of one run. `finetune` is None in pretraining."""

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
            raise ConfigError(
                f"Corpus.sequence_length {length} is longer than the position table: "
                f"set Model.max_positions to {length} or more")
        if self.model.decoder_layers == 0 and self.masking.encoder_mask_fraction < 1:
            raise ConfigError(
                "Model.decoder_layers = 0 needs Masking.encoder_mask_fraction = 1: "
                "without a decoder nothing stands at a dropped position")
        drops = self.masking.compact and self.masking.encoder_mask_fraction < 1
        if self.model.local_attention and self.finetune is None and drops:
            raise ConfigError(
                "Model.local_attention is for encoders that read whole rows, and the compact "
                "encoder drops positions: set Masking.compact to False")
        for start, rate in self.masking.rate_plateaus:
            if rate * length < 1:
                raise ConfigError(
                    f"Masking.rate_plateaus: rate {rate:g} from {start:g} on masks less than one "
                    f"of the {length} tokens of a row. Use {1 / length:.2g} or more")
        if self.finetune is not None and self.optimizer.kind != "adamw":
            raise ConfigError("Optimizer.kind = 'muon' is of pretraining: use 'adamw' here")
        if self.finetune is not None and self.optimizer.ema_decay:
            raise ConfigError("Optimizer.ema_decay is of pretraining: leave it at 0 here")
        self._check_accumulation()

    def _check_accumulation(self):
        """Raises ConfigError when a batch cannot be cut into microbatches of equal size."""
        sizes = self.run.named_batch_sizes
        if self.finetune is not None:  # a run of the grid has its batch size from there
            sizes = [("Grid.batch_size", size) for size in self.finetune.grid.listed("batch_size")]
        for name, size in sizes:
            if size % self.run.accumulate != 0:
                raise ConfigError(
                    f"{name} {size} is not divisible by Run.accumulate {self.run.accumulate}")


SECTIONS = (Vocabulary, Corpus, Masking, Model, Optimizer, Mesh, Run)
ALL_SECTIONS = (*SECTIONS, *config_finetune.SECTIONS)


def sections(experiment: Experiment) -> list[Settings]:
    """All sections of an experiment. A section that lies in another one comes after it."""
    parts = []
    for field in dataclasses.fields(experiment):
        part = getattr(experiment, field.name)
        if part is not None:
            parts += [part, *part.sections()]
    return parts


def values(experiment: Experiment) -> dict[str, typing.Any]:
    """{"Section.field": value} of all settings."""
    return {
        f"{type(part).__name__}.{name}": getattr(part, name)
        for part in sections(experiment)
        for name in field_names(type(part))
    }


if __name__ == "__main__":
    sys.stdout.write(page(ALL_SECTIONS))
