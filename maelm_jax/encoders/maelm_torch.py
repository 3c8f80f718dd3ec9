"""MAE-LM in plain PyTorch: encoder, decoder and prediction head, any relative-bucket function. Needs torch and safetensors, nothing else.

This file stands beside a `config.json` and a `model.safetensors` that `python -m maelm_jax.export --format=pytorch` wrote:

    from maelm import MaeLm
    model = MaeLm.from_folder(".").eval()
    states = model(ids, attention_mask)                  # [batch, length, width], the encoder's last hidden states
    logits = model.predict(ids, masked, attention_mask)  # [batch, length, vocabulary], of use at the masked positions

Ids are `<s> text </s>`, padded on the right; `tokenizer.json` makes them (tokenizers.Tokenizer, with `encode_special_tokens = True`).
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
    """long [2 positions - 1]: the row of the bias table for each (key position - query position) from -(positions - 1) on.

    `t5` is the function of Raffel et al. and MPNet; `reference` that of the published MAE-LM code, whose offset depends on `positions`.
    """
    distance = torch.arange(-positions + 1, positions, dtype=torch.float64)
    n, half = distance.abs(), buckets // 2
    exact = half // 2
    far = torch.log(
        n.clamp(min=exact) / exact
    )  # a distance on a boundary must not fall to one side by rounding: hence the 1e-9 below
    if kind == "t5":
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
    """A table (buckets x heads), looked up by key position - query position; added to the attention scores of every layer."""

    def __init__(self, settings: dict):
        super().__init__(settings["num_buckets"], settings["heads"])
        kind, positions = settings["relative_buckets"], settings["max_positions"]
        buckets = bucket_of_distance(
            kind, settings["num_buckets"], settings["max_distance"], positions
        )
        self.register_buffer("buckets", buckets, persistent=False)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """long [batch, length] -> [batch, heads, length, length]."""
        distance = positions[:, None, :] - positions[:, :, None] + len(self.buckets) // 2
        return super().forward(self.buckets[distance]).permute(0, 3, 1, 2)


class Block(nn.Module):
    """One post-LN Transformer layer: x = LN(x + attention(x)); x = LN(x + W2 gelu(W1 x))."""

    def __init__(self, settings: dict, dropout: float, attention_dropout: float):
        super().__init__()
        width, inner, eps = settings["width"], settings["feed_forward"], settings["layer_norm_eps"]
        self.heads, self.dropout, self.attention_dropout = (
            settings["heads"],
            dropout,
            attention_dropout,
        )
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(width, eps)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        rate = self.attention_dropout if self.training else 0.0
        y = (
            functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=rate)
            .transpose(1, 2)
            .flatten(2)
        )
        x = self.attention_norm(x + functional.dropout(self.out(y), self.dropout, self.training))
        y = self.down(functional.gelu(self.up(x)))
        return self.output_norm(x + functional.dropout(y, self.dropout, self.training))


class Stack(nn.Module):
    """Position embedding, LayerNorm, blocks: what encoder and decoder have in common. Dropout rates are 0 in the decoder."""

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

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """x [batch, length, width]; where `visible` is False nothing is read, and the output has no meaning."""
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
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


class Head(nn.Module):
    """dense -> GELU -> LayerNorm -> times the token table, plus a bias an id."""

    def __init__(self, settings: dict, vocabulary_size: int):
        super().__init__()
        self.dense = nn.Linear(settings["width"], settings["width"])
        self.norm = nn.LayerNorm(settings["width"], settings["layer_norm_eps"])
        self.bias = nn.Parameter(torch.zeros(vocabulary_size))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(functional.gelu(self.dense(x))), table, self.bias)


class MaeLm(nn.Module):
    """`config` is the content of config.json."""

    def __init__(self, config: dict):
        super().__init__()
        settings, size = config["model"], config["vocabulary_size"]
        self.pad, self.mask = config["special_ids"]["pad"], config["special_ids"]["mask"]
        self.encoder = Encoder(settings, size)
        depth, relative = settings["decoder_layers"], settings["decoder_relative_bias"]
        self.decoder = Stack(settings, depth, relative, 0.0, 0.0) if depth else None
        self.head = Head(settings, size)

    @classmethod
    def from_folder(cls, folder: str) -> "MaeLm":
        """The model of config.json with the weights of model.safetensors; every tensor must be there and fit."""
        model = cls(json.loads((pathlib.Path(folder) / "config.json").read_text(encoding="utf-8")))
        model.load_state_dict(load_file(pathlib.Path(folder) / "model.safetensors"))
        return model

    def forward(
        self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The encoder's last hidden states of ids [batch, length]; `attention_mask` is 0 at padding (default: where the id is `<pad>`)."""
        visible = ids != self.pad if attention_mask is None else attention_mask.bool()
        return self.encoder(self.encoder.token_embedding(ids), visible)

    def predict(
        self,
        ids: torch.Tensor,
        masked: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        visible_to_encoder: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [batch, length, vocabulary] of the ids at the positions where `masked` (bool) is True; what stands there is not read.

        At the masked positions where `visible_to_encoder` is True the encoder reads `<mask>` (default: everywhere without a decoder, which
        is MLM; nowhere
        with one, which is MAE-LM). The others are hidden from the encoder; the decoder has `<mask>` there.
        """
        table = self.encoder.token_embedding.weight
        present = ids != self.pad if attention_mask is None else attention_mask.bool()
        visible_to_encoder = masked & (
            torch.full_like(masked, self.decoder is None)
            if visible_to_encoder is None
            else visible_to_encoder
        )
        x = self.encoder(
            self.encoder.token_embedding(torch.where(masked, self.mask, ids)),
            present & (~masked | visible_to_encoder),
        )
        if self.decoder is not None:
            x = self.decoder(
                torch.where((masked & ~visible_to_encoder)[:, :, None], table[self.mask], x),
                present,
            )
        return self.head(x, table)
