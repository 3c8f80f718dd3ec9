"""MAE-LM in plain PyTorch: encoder, decoder and prediction head. Needs torch and safetensors.

`python -m maelm_jax.export --format=pytorch` writes this file as maelm.py, beside a `config.json`
and a `model.safetensors`:

    from maelm import MaeLm
    model = MaeLm.from_folder(".").eval()
    states = model(ids, attention_mask)                  # [batch, length, width]
    logits = model.predict(ids, masked, attention_mask)  # [batch, length, vocabulary]

`states` are the last hidden states of the encoder. `logits` are useful at the masked positions.
`ids` are `<s> text </s>`, padded on the right. `tokenizer.json` gives them, as a
tokenizers.Tokenizer; it reads `<mask>` in a text as the mask. Without a `tokenizer.json`, the
README of the folder shows how `sentencepiece.model` gives them.

Paper: Representation Deficiency in Masked Language Modeling, arXiv 2302.02060.
"""

import json
import math
import pathlib

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional


def bucket_of_distance(kind: str, buckets: int, max_distance: int, positions: int) -> torch.Tensor:
    """Returns the row of the bias table for each relative distance.

    Args:
        kind: "t5" (Raffel et al., arXiv 1910.10683; also MPNet) or "reference" (the published
            MAE-LM code, whose row numbers depend on `positions`). A decoder beside an encoder
            with "none" has the rows of "t5".
        buckets: The number of rows of the table.
        max_distance: In each direction, distances of at least this share one row.
        positions: The number of positions.

    Returns:
        int64 [2 positions - 1], for key position - query position from -(positions - 1) on.
    """
    distance = torch.arange(-positions + 1, positions, dtype=torch.float64)
    n, half = distance.abs(), buckets // 2
    exact = half // 2
    # The 1e-9 below keeps rounding errors from moving a distance on a boundary to another bucket.
    far = torch.log(n.clamp(min=exact) / exact)
    if kind != "reference":
        spread = torch.floor(far / math.log(max_distance / exact) * (half - exact) + 1e-9)
        bucket = torch.where(n < exact, n, (exact + spread).clamp(max=half - 1)) + half * (
            distance > 0
        )
    else:
        spread = torch.ceil(far / math.log((max_distance - 1) / exact) * (half - 1 - exact) - 1e-9)
        bucket = distance.sign() * torch.where(n < exact, n, (exact + spread).clamp(max=half - 1))
        bucket = bucket - bucket.min()
    return bucket.long()


class RelativeBias(nn.Embedding):
    """Relative position bias [buckets, heads], added to the attention scores of every layer."""

    def __init__(self, settings: dict):
        super().__init__(settings["num_buckets"], settings["heads"])
        kind, positions = settings["relative_buckets"], settings["max_positions"]
        buckets = bucket_of_distance(
            kind, settings["num_buckets"], settings["max_distance"], positions
        )
        self.register_buffer("buckets", buckets, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the bias [batch, heads, length, length] of int64 positions [batch, length]."""
        distance = positions[:, None, :] - positions[:, :, None] + len(self.buckets) // 2
        return super().forward(self.buckets[distance]).permute(0, 3, 1, 2)


class Block(nn.Module):
    """One post-LN Transformer layer: x = LN(x + attention(x)), then x = LN(x + W2 gelu(W1 x))."""

    def __init__(self, settings: dict, dropout: float, attention_dropout: float):
        super().__init__()
        width, inner, eps = settings["width"], settings["feed_forward"], settings["layer_norm_eps"]
        self.heads, self.dropout = settings["heads"], dropout
        self.attention_dropout = attention_dropout
        names = ("query", "key", "value", "out")
        self.attention = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.attention_norm = nn.LayerNorm(width, eps)
        self.feed_forward = nn.ModuleDict(
            {"up": nn.Linear(width, inner), "down": nn.Linear(inner, width)}
        )
        self.feed_forward_norm = nn.LayerNorm(width, eps)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.attention[name](x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        rate = self.attention_dropout if self.training else 0.0
        y = (
            functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=rate)
            .transpose(1, 2)
            .flatten(2)
        )
        y = functional.dropout(self.attention["out"](y), self.dropout, self.training)
        x = self.attention_norm(x + y)
        y = self.feed_forward["down"](functional.gelu(self.feed_forward["up"](x)))
        return self.feed_forward_norm(x + functional.dropout(y, self.dropout, self.training))


class Stack(nn.Module):
    """Position embedding, LayerNorm and blocks, for encoder and decoder.

    The dropout rates of the decoder are 0.
    """

    def __init__(
        self, settings: dict, layers: int, relative: bool, dropout: float, attention_dropout: float
    ):
        super().__init__()
        self.position_embedding = nn.Embedding(settings["max_positions"], settings["width"])
        self.norm = nn.LayerNorm(settings["width"], settings["layer_norm_eps"])
        self.relative_bias = RelativeBias(settings) if relative else None
        self.blocks = nn.ModuleList(
            Block(settings, dropout, attention_dropout) for _ in range(layers)
        )
        self.dropout = dropout

    def forward(
        self, x: torch.Tensor, visible: torch.Tensor, renumber: bool = False
    ) -> torch.Tensor:
        """Returns hidden states [batch, length, width] of embedded tokens `x` of the same shape.

        No position attends to a position where `visible` [batch, length] is False. The output
        there is meaningless. `renumber` numbers the visible positions only.
        """
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        if renumber:
            positions = visible.cumsum(1) - visible.long()
        x = (
            functional.dropout(
                self.norm(x + self.position_embedding(positions)), self.dropout, self.training
            )
            * visible[:, :, None]
        )
        bias = torch.where(visible, 0.0, -1e9).to(x.dtype)[:, None, None, :]
        if self.relative_bias is not None:
            bias = bias + self.relative_bias(positions)
        for block in self.blocks:
            x = block(x, bias)
        return x


class Encoder(Stack):
    """A stack with the token embedding, which the caller applies."""

    def __init__(self, settings: dict, vocabulary_size: int):
        relative = settings["relative_buckets"] != "none"
        super().__init__(
            settings,
            settings["layers"],
            relative,
            settings["dropout"],
            settings["attention_dropout"],
        )
        self.token_embedding = nn.Embedding(vocabulary_size, settings["width"])
        if settings["token_types"]:
            self.token_type_embedding = nn.Embedding(settings["token_types"], settings["width"])

    def embed(self, ids: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the embeddings of ids [batch, length], and of their token types (default 0)."""
        x = self.token_embedding(ids)
        if hasattr(self, "token_type_embedding"):
            x = x + self.token_type_embedding(torch.zeros_like(ids) if types is None else types)
        return x


class Head(nn.Module):
    """Prediction head: dense, GELU, LayerNorm, product with the token table, bias for each id."""

    def __init__(self, settings: dict, vocabulary_size: int):
        super().__init__()
        self.dense = nn.Linear(settings["width"], settings["width"])
        self.norm = nn.LayerNorm(settings["width"], settings["layer_norm_eps"])
        self.bias = nn.Parameter(torch.zeros(vocabulary_size))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(functional.gelu(self.dense(x))), table, self.bias)


class MaeLm(nn.Module):
    """The encoder, the decoder (if there is one) and the prediction head.

    Args:
        config: The content of config.json.
    """

    def __init__(self, config: dict):
        super().__init__()
        settings, size = config["model"], config["vocabulary_size"]
        self.pad, self.mask = config["special_ids"]["pad"], config["special_ids"]["mask"]
        self.encoder = Encoder(settings, size)
        depth, relative = settings["decoder_layers"], settings["decoder_relative_bias"]
        self.decoder = Stack(settings, depth, relative, 0.0, 0.0) if depth else None
        self.refills_mask = settings["decoder_refills_mask"]
        self.encoder_reads_masks = config["encoder_mask_fraction"] > 0.5
        self.renumber = config["renumber"]
        self.head = Head(settings, size)

    @classmethod
    def from_folder(cls, folder: str) -> "MaeLm":
        """Loads the model of config.json with the weights of model.safetensors.

        Raises:
            RuntimeError: A tensor is missing, unknown or of the wrong shape.
        """
        model = cls(json.loads((pathlib.Path(folder) / "config.json").read_text(encoding="utf-8")))
        model.load_state_dict(load_file(pathlib.Path(folder) / "model.safetensors"))
        return model

    def forward(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the last hidden states of the encoder.

        Args:
            ids: int64 [batch, length].
            attention_mask: [batch, length], 0 at padding; by default, 0 where the id is `<pad>`.
            types: int64 [batch, length], the token types; by default 0.

        Returns:
            [batch, length, width].
        """
        visible = ids != self.pad if attention_mask is None else attention_mask.bool()
        return self.encoder(self.encoder.embed(ids, types), visible)

    def predict(
        self,
        ids: torch.Tensor,
        masked: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        visible_to_encoder: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predicts the ids at the masked positions.

        The ids at these positions are not read. If `visible_to_encoder` is True, the encoder reads
        `<mask>` at the position. Otherwise the encoder skips it, and the decoder reads `<mask>`.

        Args:
            ids: int64 [batch, length].
            masked: bool [batch, length].
            attention_mask: [batch, length], 0 at padding; by default, 0 where the id is `<pad>`.
            visible_to_encoder: bool [batch, length]. By default all True if the encoder read
                `<mask>` at more than half of the masked positions in pretraining (MLM), else all
                False (MAE-LM).

        Returns:
            Logits [batch, length, vocabulary].
        """
        table = self.encoder.token_embedding.weight
        present = ids != self.pad if attention_mask is None else attention_mask.bool()
        visible_to_encoder = masked & (
            torch.full_like(masked, self.encoder_reads_masks)
            if visible_to_encoder is None
            else visible_to_encoder
        )
        x = self.encoder(
            self.encoder.embed(torch.where(masked, self.mask, ids)),
            present & (~masked | visible_to_encoder),
            self.renumber,
        )
        if self.decoder is not None:
            refilled = masked if self.refills_mask else masked & ~visible_to_encoder
            x = self.decoder(torch.where(refilled[:, :, None], table[self.mask], x), present)
        return self.head(x, table)
