"""The settings of the model: the encoder, the decoder above it and the prediction head."""

import dataclasses
import typing

from maelm_jax.settings import Count, Positive, Settings, ShareBelowOne, Width, declare, setting

Family = typing.Literal["bert", "distilbert", "electra", "roberta", "mpnet", "modernbert"]


@declare
class Model(Settings):
    """The encoder, the decoder above it and the prediction head."""

    layers: int = setting(12, "Layers of the encoder.", "layers", ge=1, le=1000)
    width: Width = setting(768, "Size of a hidden state.", "values")
    heads: Width = setting(12, "Attention heads. They divide `width`.", "heads")
    feed_forward: int = setting(3072, "Width of the feed-forward block.", "values", ge=1, le=2**24)
    feed_forward_gate: bool = setting(
        False, "True multiplies the activation by a second linear map: GeGLU."
    )
    normalization: typing.Literal["post", "pre"] = setting(
        "post", "Where LayerNorm stands: `post` after each sum (BERT), `pre` before each sublayer."
    )
    biases: bool = setting(
        True, "False leaves the biases out of the layers' linear maps and all normalizations."
    )
    decoder_layers: int = setting(
        4, "Layers of the decoder. 0 needs all [MASK]s in the encoder.", "layers", ge=0, le=1000
    )
    decoder_width: Width | None = setting(
        None, "Width of the decoder, with heads of the encoder's size. None is `width`.", "values"
    )
    decoder_attention: typing.Literal["self", "self+cross", "cross"] = setting(
        "self",
        "The decoder attends to its own states (self), those of the encoder (cross) or "
        "both in turn.",
    )
    decoder_causal: bool = setting(False, "True hides later slots from its self-attention.")
    decoder_slots: typing.Literal["all", "masked"] = setting(
        "all", "Slots that the decoder computes. `masked` needs cross-attention."
    )
    decoder_refills_mask: bool = setting(
        True, "True gives the decoder [MASK] also where the encoder saw a masked slot."
    )
    positions: typing.Literal["learned", "rotary"] = setting(
        "learned", "Positions: `learned` adds rows of a table, `rotary` turns queries and keys."
    )
    rotary_theta: float = setting(
        10_000.0, "Base of the wavelengths of rotary positions.", gt=1, le=1e9
    )
    local_attention: Count = setting(
        0, "Window of layers with local attention, half to each side. 0: no such layers.", "tokens"
    )
    global_every: Positive = setting(
        3, "With local attention, layers 0, n, 2n, ... attend to the whole segment.", "layers"
    )
    local_rotary_theta: float = setting(
        10_000.0, "Base in layers with local attention (`rotary_theta`).", gt=1, le=1e9
    )
    max_positions: int = setting(
        512, "The longest row that fits; rows of a learned table.", "tokens", ge=1, le=2**20
    )
    token_types: int = setting(
        0,
        "Rows of the token-type table: 1 in RoBERTa, 2 in BERT. 0 is no table.",
        "types",
        ge=0,
        le=16,
    )
    relative_buckets: typing.Literal["t5", "reference", "none"] = setting(
        "t5", "Relative position bias. `t5` loads into stock MPNet, `none` into stock RoBERTa."
    )
    num_buckets: int = setting(32, "Buckets of the bias.", "buckets", ge=8, le=2**20, multiple_of=4)
    max_distance: Positive = setting(128, "From here on all pairs share a bucket.", "tokens")
    relative_bias_init: typing.Literal["normal", "local"] = setting(
        "normal", "How the bias starts. `local` is minus the distance times a slope per head."
    )
    decoder_relative_bias: bool = setting(
        False, "True gives the decoder a relative bias of its own, also if the encoder has none."
    )
    init_std: float = setting(0.02, "Standard deviation of the initial weights.", gt=0, le=100)
    unigram_bias: bool = setting(False, "True starts the head's bias at log frequencies.")
    dropout: ShareBelowOne = setting(0.1, "Dropout of the encoder. The decoder has none.")
    attention_dropout: ShareBelowOne = setting(0.1, "Dropout of the encoder's attention weights.")
    layer_norm_eps: float = setting(
        1e-5, "Added to the variance in layer normalisation.", ge=1e-30, le=1
    )
    family: Family | None = setting(
        None,
        "Stock family: decides sentence pairs, heads and the class of an export. "
        "None is the first that fits.",
    )
    dtype: typing.Literal["float32", "bfloat16"] = setting(
        "float32", "Type of the computation. Parameters are float32."
    )
    attention_backend: typing.Literal["auto", "xla", "cudnn", "pallas_tpu"] = setting(
        "auto", "What computes attention. `auto` is a fused kernel where the device has one."
    )
    rematerialise: bool = setting(False, "True recomputes layers in the backward pass.")
    scan_layers: bool | None = setting(
        None,
        "True compiles one layer and loops over it, False each layer. None: True except on GPUs.",
    )
    logit_tile: Positive | None = setting(
        None, "Masked tokens whose logits exist at a time. None is all of them.", "tokens"
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
    def without_decoder(self) -> "Model":
        """The model of the encoder alone. The settings of its decoder are those of the paper's."""
        return dataclasses.replace(
            self,
            decoder_layers=0,
            decoder_relative_bias=False,
            decoder_width=None,
            decoder_attention="self",
            decoder_causal=False,
            decoder_slots="all",
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
