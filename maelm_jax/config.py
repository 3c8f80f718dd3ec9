"""All settings, one frozen dataclass for each concern. gin binds nothing else.

settings.py checks every field against its declaration here. `python -m maelm_jax.config` prints
docs/configuration.md. gin_files.py reads gin files into an `Experiment`. This module imports
neither JAX nor TensorFlow, so that a wrong setting is reported within a second.
config_finetune.py has the settings of fine-tuning, config_model.py those of the model,
config_optimizer.py those of the optimizer, config_run.py those of the length of a run.
"""

import dataclasses
import sys
import typing

from maelm_jax import config_finetune
from maelm_jax.config_finetune import RANDOM as RANDOM
from maelm_jax.config_finetune import Conll as Conll
from maelm_jax.config_finetune import CustomTask as CustomTask
from maelm_jax.config_finetune import Finetune
from maelm_jax.config_finetune import Grid as Grid
from maelm_jax.config_finetune import Squad as Squad
from maelm_jax.config_model import Model as Model
from maelm_jax.config_optimizer import Optimizer as Optimizer
from maelm_jax.config_run import Run as Run
from maelm_jax.settings import (
    Axis,
    Rate,
    Settings,
    Share,
    ShareBelowOne,
    ShareInside,
    Text,
    declare,
    field_names,
    page,
    setting,
)
from maelm_jax.settings import ConfigError as ConfigError
from maelm_jax.settings import RunError as RunError
from maelm_jax.special_ids import SpecialIds as SpecialIds

LEAST_VOCABULARY = 300  # ids


@declare
class Vocabulary(Settings):
    """How text becomes ids."""

    file: Text | None = setting(
        None, "SentencePiece .model or Hugging Face tokenizer.json. None trains one on the corpus."
    )
    size: int = setting(
        32768,
        "Ids, special tokens included. Not read with `file`.",
        "ids",
        ge=LEAST_VOCABULARY,
        le=2**24,
    )
    cased: bool = setting(False, "True keeps upper case. Not read with `file`.")
    sample_megabytes: float = setting(
        64.0,
        "Text to train the vocabulary on, picked by document hash from 8 times as much.",
        "MB",
        gt=0,
        le=1e6,
    )


@declare
class Corpus(Settings):
    """Where text comes from and how it is cut into rows. A row is one packed training sequence."""

    sources: dict[Text, Rate] = setting(
        lambda: {"installed_docs": 1.0},
        "Rate of each source in the mixture. A source is "
        "`installed_docs`, `files:GLOB`, `tfds:NAME` or `seqio:NAME`.",
    )
    text_files: Text | None = setting(
        None, "Glob of files of text, also gs:// or s3:// (docs/data.md). It replaces `sources`."
    )
    json_field: Text = setting("text", "Field of a .jsonl record that holds the document.")
    text_column: Text = setting(
        "text", "Column of .parquet and .arrow files, feature of TFRecord and ArrayRecord files."
    )
    task_modules: tuple[Text, ...] = setting(
        (), "Python modules to import, so that `seqio:` names are registered."
    )
    tfds_data_dir: Text | None = setting(None, "Folder of TFDS datasets. None is TFDS's own.")
    sequence_length: int = setting(512, "Length of a row.", "tokens", ge=8, le=2**20)
    heldout_fraction: float = setting(
        0.005, "Share of documents, by hash of their text, kept for evaluation.", gt=0, lt=0.5
    )
    minimum_characters: int = setting(
        0, "Shorter documents are left out.", "characters", ge=0, le=10**9
    )
    document_filter: Text | None = setting(
        None, "Python function `module:function`. Leaves out documents for which it is False."
    )
    deduplicate: bool = setting(
        False, "True leaves out a document whose exact text came before in its source."
    )
    skip_bad_files: bool = setting(
        False, "True leaves out files that cannot be read. False ends the command."
    )
    rows_dir: Text = setting("rows", "Folder of prepared rows, shared by runs.")
    shuffle_shards: int = setting(
        0, "Files whose rows are shuffled together. 0 is all of a source.", ge=0, le=10**6
    )
    cache_gb: float = setting(
        0.0, "Memory for rows read in place. 0 copies those in a bucket.", "GB", ge=0, le=1e5
    )
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
            f"document_filter must be module:function, got {self.document_filter!r}",
        )

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
    rate_plateaus: tuple[tuple[ShareBelowOne, ShareInside], ...] = setting(
        (),
        "Rates in training: (share of the steps done, `rate` from there on), the first at 0. "
        "Evaluations keep `heldout_rate`.",
    )
    heldout_rate: float | None = setting(
        None,
        "Rate in evaluations and rank measurements, for comparison with runs that train at "
        "other rates. None: `rate`.",
        gt=0,
        lt=1,
    )
    unit: typing.Literal["token", "word", "span"] = setting(
        "token", "What is masked as a whole. A span is 4.5 tokens long on average."
    )
    encoder_mask_fraction: Share = setting(
        0.0, "Share of the masked positions whose [MASK] enters the encoder: 0 MAE-LM, 1 MLM."
    )
    random_fraction: Share = setting(
        0.0,
        "Of the masked positions that the encoder reads, the share that gets a random token "
        "instead of [MASK] (BERT: 0.1).",
    )
    keep_fraction: Share = setting(
        0.0,
        "Of the masked positions that the encoder reads, the share that keeps its token "
        "(BERT: 0.1).",
    )
    renumber: bool = setting(
        False, "True gives the encoder positions 0, 1, 2, ... of visible tokens only."
    )
    mask_special_tokens: bool = setting(False, "True masks `<s>` and `</s>` as well.")

    def check(self):
        starts = [start for start, _ in self.rate_plateaus]
        self.require(
            starts == sorted(set(starts)) and starts[:1] in ([], [0]),
            f"rate_plateaus must begin at 0 and ascend, got {self.rate_plateaus}",
        )
        both = "random_fraction and keep_fraction"
        shares = self.random_fraction + self.keep_fraction
        self.require(shares <= 1, f"{both} must not exceed 1 together, got {shares}")
        self.require(
            shares == 0 or self.encoder_mask_fraction > 0,
            f"{both} say what enters the encoder: set encoder_mask_fraction above 0",
        )

    @property
    def named_rates(self) -> list[tuple[str, float]]:
        """The mask rates of training and evaluation, each with the setting that it comes from."""
        rates = [
            (f"Masking.rate_plateaus: rate {rate:g} from {start:g} on", rate)
            for start, rate in self.rate_plateaus
        ]
        if self.heldout_rate is not None:
            rates.append((f"Masking.heldout_rate={self.heldout_rate:g}", self.heldout_rate))
        if not self.rate_plateaus or self.heldout_rate is None:
            rates.append((f"Masking.rate={self.rate:g}", self.rate))
        return rates


@declare
class Mesh(Settings):
    """How devices are divided. The product is the number of devices."""

    data: Axis = setting(
        -1, "Data parallelism. One axis can be -1: it takes the devices that are left.", "devices"
    )
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
        for name, rate in self.masking.named_rates:
            if rate * length < 1:
                raise ConfigError(
                    f"{name} masks less than one of the {length} tokens of a row. "
                    f"Use {1 / length:.2g} or more"
                )
        if self.finetune is not None and self.optimizer.kind != "adamw":
            raise ConfigError(
                "Optimizer.kind = 'muon' works in pretraining only. Set 'adamw' to fine-tune, or "
                "leave the finetune files out to pretrain"
            )
        if self.finetune is not None and self.optimizer.ema_decay:
            raise ConfigError(
                "Optimizer.ema_decay works in pretraining only. Set it to 0 to fine-tune"
            )
        self._check_accumulation()

    @property
    def evaluated(self) -> typing.Self:
        """Settings of evaluations and rank measurements. Their mask rate is the held-out one."""
        rate = self.masking.heldout_rate or self.masking.rate
        masking = dataclasses.replace(self.masking, rate=rate, rate_plateaus=(), heldout_rate=None)
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
        sizes = self.run.named_batch_sizes
        if self.finetune is not None:  # a run of the grid has its batch size from there
            sizes = [("Grid.batch_size", size) for size in self.finetune.grid.listed("batch_size")]
        for name, size in sizes:
            if size % self.run.accumulate != 0:
                raise ConfigError(
                    f"{name} {size} is not divisible by Run.accumulate {self.run.accumulate}"
                )


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
