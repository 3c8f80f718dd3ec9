"""MAE-LM (arXiv 2302.02060) for transformers: a stock encoder, and the decoder that predicts.

    AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)

maelm_jax writes this file into the folders that it exports. The encoder is the stock class of the
folder, and no token of it attends to [MASK]. The decoder reads the encoder's states, with the
embedding of [MASK] at masked positions, and predicts. Its settings are `mae_lm` in config.json, its
weights and those of the head are in decoder.safetensors. Training computes a loss at masked
positions only. So logits at the other positions exist, from the decoder's states there, but were
never trained.

Axis letters: B rows, L tokens, H heads.
"""

import copy
import math
import os

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import cached_file

WEIGHTS = "decoder.safetensors"
OLDEST = (4, 51)  # of transformers
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")

if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
    raise ImportError(
        f"modeling_mae_lm.py needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, and this is "
        f"{transformers.__version__}: pip install -U transformers"
    )


def rotate(x, positions, theta):
    """Returns queries or keys x [B, H, L, size], turned by positions [B, L] (rotary positions)."""
    size = x.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, device=x.device).float() / size)
    angles = (positions[:, None, :, None].float() * frequencies).repeat(1, 1, 1, 2)
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * angles.cos() + turned * angles.sin()).to(x.dtype)


def distance_buckets(positions, buckets, max_distance):
    """Returns the bucket [B, L, L] of each distance of a key from a query (T5, MPNet)."""
    distance = positions[:, None, :] - positions[:, :, None]
    half, exact = buckets // 2, buckets // 4
    far = distance.abs().clamp(min=exact).double() / exact
    spread = far.log() / math.log(max_distance / exact) * (half - exact)
    far = (exact + (spread + 1e-9).floor().long()).clamp(max=half - 1)
    return torch.where(distance.abs() < exact, distance.abs(), far) + half * (distance > 0)


class DecoderError(Exception):
    """WEIGHTS is missing or does not fit. `pipeline` would hide an OSError or a ValueError."""


class Attention(nn.Module):
    """Multi-head attention. `bias` [B, 1 or H, L, L] is added to the scores."""

    def __init__(self, settings):
        super().__init__()
        width, use_bias = settings["width"], settings["biases"]
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(width, width, bias=use_bias))
        self.heads, self.theta = settings["heads"], settings["rotary_theta"]

    def forward(self, states, context, bias, positions):
        """Lets each token of `states` attend to those of `context`, both [B, L, width]."""
        parts = self.query(states), self.key(context), self.value(context)
        query, key, value = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in parts)
        if self.theta is not None:
            query, key = (rotate(x, positions, self.theta) for x in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The feed-forward block, with or without a gate."""

    def __init__(self, settings):
        super().__init__()
        width, inner, use_bias = settings["width"], settings["feed_forward"], settings["biases"]
        self.up = nn.Linear(width, inner, bias=use_bias)
        self.gate = nn.Linear(width, inner, bias=use_bias) if settings["gate"] else None
        self.down = nn.Linear(inner, width, bias=use_bias)
        self.approximate = "tanh" if settings.get("hidden_act") == "gelu_new" else "none"

    def forward(self, x):
        """Returns the output for x [B, L, width], without the residual connection."""
        activation = functional.gelu(self.up(x), approximate=self.approximate)
        return self.down(activation if self.gate is None else activation * self.gate(x))


def layer_norm(width, settings):
    """Returns a LayerNorm with the settings of the decoder."""
    return nn.LayerNorm(width, settings["layer_norm_eps"], bias=settings["biases"])


class Block(nn.Module):
    """One layer. A LayerNorm follows each part, also in a pre-LN stack."""

    def __init__(self, settings):
        super().__init__()
        width = settings["width"]
        self.attention, self.attention_norm = Attention(settings), layer_norm(width, settings)
        if settings["attention"] == "self+cross":
            self.cross_attention = Attention(settings)
            self.cross_attention_norm = layer_norm(width, settings)
        self.feed_forward = FeedForward(settings)
        self.feed_forward_norm = layer_norm(width, settings)
        self.kind, self.is_pre_norm = settings["attention"], settings["normalization"] == "pre"

    def forward(self, total, states, encoded, bias, cross_bias, positions):
        """Returns the sum of the residual connections, and the same after LayerNorm."""
        is_cross = self.kind == "cross"
        context, first_bias = (encoded, cross_bias) if is_cross else (states, bias)
        output = self.attention(states, context, first_bias, positions)
        total = (total if self.is_pre_norm else states) + output
        states = self.attention_norm(total)
        if self.kind == "self+cross":
            output = self.cross_attention(states, encoded, cross_bias, positions)
            total = (total if self.is_pre_norm else states) + output
            states = self.cross_attention_norm(total)
        total = (total if self.is_pre_norm else states) + self.feed_forward(states)
        return total, self.feed_forward_norm(total)


class Decoder(nn.Module):
    """The decoder. It computes the states of all tokens."""

    def __init__(self, encoder_width, settings):
        super().__init__()
        width, resizes = settings["width"], settings["width"] != encoder_width
        use_bias = settings["biases"]
        self.resize = nn.Linear(encoder_width, width, bias=use_bias) if resizes else nn.Identity()
        rows, buckets = settings["position_rows"], settings["relative_buckets"]
        self.position_embedding = nn.Parameter(torch.zeros(rows, width)) if rows else None
        self.norm = layer_norm(width, settings)
        if buckets:
            table = nn.Parameter(torch.zeros(buckets, settings["heads"]))
            self.relative_bias = nn.ParameterDict({"table": table})
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings["layers"]))
        self.settings = settings

    def forward(self, states, encoded, tokens, visible, masked):
        """Returns states [B, L, width].

        Args:
            states: The encoder's states, or the embedding of [MASK].
            encoded: The encoder's states, for cross-attention.
            tokens: Which positions are no padding, bool [B, L].
            visible: Which of them the encoder read.
            masked: Which of them are predicted.
        """
        settings, positions = self.settings, (tokens.long().cumsum(1) - 1).clamp(min=0)
        states, encoded = self.resize(states), self.resize(encoded)
        if self.position_embedding is not None:
            states = states + self.position_embedding[positions]
        states = self.norm(states) * tokens[:, :, None]
        seen = tokens[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        diagonal = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
        if settings["slots"] == "masked":  # trained at masked positions only, beside each other
            seen = masked[:, None, None, :] | diagonal
        if settings["causal"]:
            seen = seen & torch.ones_like(diagonal).tril()
        bias, cross_bias = (
            torch.zeros(mask.shape, dtype=states.dtype, device=states.device).masked_fill(
                ~mask, torch.finfo(states.dtype).min
            )
            for mask in (seen, visible[:, None, None, :].expand_as(seen))
        )
        if settings["relative_buckets"]:
            sizes = settings["relative_buckets"], settings["max_distance"]
            table = self.relative_bias["table"][distance_buckets(positions, *sizes)]
            bias, cross_bias = (x + table.permute(0, 3, 1, 2) for x in (bias, cross_bias))
        total = states
        for block in self.blocks:
            total, states = block(total, states, encoded, bias, cross_bias, positions)
        return states


class Head(nn.Module):
    """The prediction head, whose last matrix is the token table of the encoder."""

    def __init__(self, width, vocabulary_size, settings):
        super().__init__()
        resizes = settings["width"] != width
        self.resize = nn.Linear(settings["width"], width, bias=False) if resizes else nn.Identity()
        self.dense = nn.Linear(width, width, bias=settings["biases"])
        self.norm = layer_norm(width, settings)
        self.bias = nn.Parameter(torch.zeros(vocabulary_size))

    def forward(self, states, table):
        """Returns logits [B, L, vocabulary]."""
        states = self.norm(functional.gelu(self.dense(self.resize(states))))
        return functional.linear(states, table, self.bias)


class MaeLmForMaskedLM(PreTrainedModel):
    """A stock encoder, the decoder of MAE-LM and its prediction head."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    # `from_pretrained` reads these from WEIGHTS.
    _keys_to_ignore_on_load_missing = (r"^decoder\.", r"^head\.")

    def __init__(self, config):
        settings, encoder_config = config.mae_lm["decoder"], copy.deepcopy(config)
        super().__init__(config)
        self.model = AutoModel.from_config(encoder_config)  # with the attention that it supports
        if getattr(self.model, "pooler", None) is not None:
            self.model.pooler = None  # it is not trained
        self.decoder = Decoder(config.hidden_size, settings)
        self.head = Head(config.hidden_size, config.vocab_size, settings)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        """Returns logits at all positions, and the loss if there are labels (-100 has none)."""
        settings, count = self.config.mae_lm, kwargs.pop("num_items_in_batch", None)
        return_dict = kwargs.pop("return_dict", None)
        tokens = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        tokens = tokens.bool()
        masked = (input_ids == settings["mask_token_id"]) & tokens
        visible = tokens if settings["encoder_reads_mask"] else tokens & ~masked
        outputs = self._encode(input_ids, visible, kwargs)
        encoded = outputs.last_hidden_state.masked_fill(~visible[:, :, None], 0.0)
        table = self.get_input_embeddings().weight
        refilled = masked if settings["decoder_refills_mask"] else masked & ~visible
        mask_embedding = table[settings["mask_token_id"]].to(encoded.dtype)
        states = torch.where(refilled[:, :, None], mask_embedding, encoded)
        logits = self.head(self.decoder(states, encoded, tokens, visible, masked), table)
        loss = None
        if labels is not None:
            size = {"vocab_size": self.config.vocab_size, "num_items_in_batch": count}
            loss = self.loss_function(logits, labels, **size)
        output = MaskedLMOutput(loss, logits, outputs.get("hidden_states"))
        return output.to_tuple() if return_dict is False else output

    def _encode(self, input_ids, visible, kwargs):
        """Returns the outputs of the encoder, in which no token attends to one that is hidden."""
        if not self.config.mae_lm["encoder_renumbers"]:
            return self.model(input_ids, attention_mask=visible.long(), **kwargs)
        order = (~visible).long().argsort(dim=1, stable=True)  # visible tokens: 0, 1, 2, ...
        sorted_visible = visible.gather(1, order).long()
        outputs = self.model(input_ids.gather(1, order), attention_mask=sorted_visible, **kwargs)
        index = order[:, :, None].expand_as(outputs.last_hidden_state)
        states = torch.empty_like(outputs.last_hidden_state)
        outputs["last_hidden_state"] = states.scatter(1, index, outputs.last_hidden_state)
        return outputs

    @classmethod
    def from_pretrained(cls, name, *args, **kwargs):
        """Reads the encoder as every model of transformers, and WEIGHTS beside it."""
        loaded = super().from_pretrained(name, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        try:
            file = cached_file(name, WEIGHTS, **{key: kwargs[key] for key in HUB if key in kwargs})
        except OSError as error:
            raise DecoderError(
                f"{name} has no {WEIGHTS}, which holds the decoder: export the run again"
            ) from error
        state, expected = from_file(load_file(file)), model.own_state()
        for key in sorted(state.keys() | expected.keys()):
            shapes = [tuple(x[key].shape) if key in x else None for x in (state, expected)]
            if shapes[0] != shapes[1]:
                raise DecoderError(
                    f"{name}: {WEIGHTS} does not fit config.json: {key} is {shapes[0]}, expected "
                    f"{shapes[1]}. Use the files of one export"
                )
        # transformers 4 leaves tensors that it does not find without storage.
        is_empty = any(x.is_meta for x in expected.values())
        device = model.device if is_empty else None
        state = {key: x.to(device, expected[key].dtype) for key, x in state.items()}
        model.load_state_dict(state, strict=False, assign=is_empty)
        return loaded

    def own_state(self, state=None):
        """Returns the tensors of the decoder and the head."""
        state = self.state_dict() if state is None else state
        return {key: x for key, x in state.items() if key.startswith(("decoder.", "head."))}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Refuses the names of the saved encoder, which Trainer reads back from its checkpoints."""
        if not any(key.startswith(("model.", "decoder.", "head.")) for key in state_dict):
            raise ValueError(
                "resume_from_checkpoint and load_best_model_at_end of Trainer read "
                "model.safetensors, which holds the encoder only. Every checkpoint is whole: load "
                "it with AutoModelForMaskedLM.from_pretrained(FOLDER, trust_remote_code=True)"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def resize_token_embeddings(self, *args, **kwargs):
        """Resizes the token table and the bias of the head, which is 0 for new tokens."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        bias, count = self.head.bias, len(embeddings.weight)
        resized = bias.new_zeros(count)
        resized[: len(bias)] = bias.detach()[:count]
        self.head.bias = nn.Parameter(resized, requires_grad=bias.requires_grad)
        return embeddings

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, **kwargs):
        """Writes the encoder as the stock class reads it, WEIGHTS and this file."""
        state = self.state_dict() if state_dict is None else state_dict
        own = self.own_state(state)
        if is_main_process:
            os.makedirs(save_directory, exist_ok=True)
            save_file(to_file(own), os.path.join(save_directory, WEIGHTS), {"format": "pt"})
        encoder = {key.removeprefix("model."): x for key, x in state.items() if key not in own}
        super().save_pretrained(save_directory, is_main_process, encoder, **kwargs)


def from_file(tensors):
    """Returns a state dict of WEIGHTS, which stacks the layers and has matrices [in, out]."""
    state = {}
    for path, value in tensors.items():
        *modules, last = path.split("/")
        last = "weight" if last in ("kernel", "scale") else last
        is_stacked = "blocks" in modules
        for number, part in enumerate(value if is_stacked else [value]):
            names = [f"blocks.{number}" if name == "blocks" else name for name in modules]
            state[".".join([*names, last])] = part.T if path.endswith("/kernel") else part
    return state


def to_file(state):
    """Returns the tensors of WEIGHTS: the inverse of `from_file`."""
    parts = {}
    for key, value in state.items():
        names = [name for name in key.split(".") if not name.isdigit()]
        if names[-1] == "weight":
            names[-1] = "kernel" if value.dim() == 2 else "scale"
            value = value.T if value.dim() == 2 else value
        parts.setdefault("/".join(names), []).append(value.detach())
    return {
        path: (torch.stack(values) if "/blocks/" in path else values[0]).contiguous().cpu()
        for path, values in parts.items()
    }


class MaeLmBertForMaskedLM(MaeLmForMaskedLM):
    """With the encoder BERT. transformers wants a class for each class of settings."""

    config_class = transformers.BertConfig


class MaeLmCamembertForMaskedLM(MaeLmForMaskedLM):
    """With the encoder CamemBERT."""

    config_class = transformers.CamembertConfig


class MaeLmDistilBertForMaskedLM(MaeLmForMaskedLM):
    """With the encoder DistilBERT."""

    config_class = transformers.DistilBertConfig


class MaeLmElectraForMaskedLM(MaeLmForMaskedLM):
    """With the encoder ELECTRA."""

    config_class = transformers.ElectraConfig


class MaeLmModernBertForMaskedLM(MaeLmForMaskedLM):
    """With the encoder ModernBERT."""

    config_class = transformers.ModernBertConfig


class MaeLmMPNetForMaskedLM(MaeLmForMaskedLM):
    """With the encoder MPNet."""

    config_class = transformers.MPNetConfig


class MaeLmRobertaForMaskedLM(MaeLmForMaskedLM):
    """With the encoder RoBERTa."""

    config_class = transformers.RobertaConfig


class MaeLmXLMRobertaForMaskedLM(MaeLmForMaskedLM):
    """With the encoder XLM-RoBERTa."""

    config_class = transformers.XLMRobertaConfig
