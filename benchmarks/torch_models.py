"""The model in PyTorch, twice: the same computation, and with masked positions only hidden.

forward(inputs) of both is the mean loss. `inputs` has the fields of model_inputs.Inputs as tensors.
"""

import functools
import typing

import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers.models.roberta import modeling_roberta

from maelm_jax import config
from maelm_jax.model.positions import MASKED_OUT, compute_distance_buckets

LAYER_NORM_EPSILON = 1e-5


class Gathered(torch.nn.Module):
    """Our model with our parameters: gathered visible tokens, relative bias, SDPA."""

    def __init__(
        self, parameters: dict, model: config.Model, size: int, special: config.SpecialIds
    ):
        """Copies the parameters.

        Args:
            parameters: Parameters of our model, as numpy arrays.
            model: Our model.
            size: Ids in the vocabulary.
            special: Special ids.
        """
        super().__init__()
        self.model, self.size, self.special = model, size, special
        self.tree = self._register(parameters, ())
        bucket = torch.tensor(compute_distance_buckets(model.encoder)).long()
        self.register_buffer("bucket", bucket, persistent=False)

    def _register(self, tree: dict, path: tuple[str, ...]) -> dict:
        """Registers arrays as parameters; those of a stack of layers become one a layer."""
        result = {}
        for name, value in tree.items():
            if isinstance(value, dict):
                result[name] = self._register(value, (*path, name))
                continue
            array = np.array(value)
            if name == "kernel":  # [in, out] -> PyTorch's [out, in]
                array = array.swapaxes(-1, -2)
            stacked = "blocks" in path
            layers = [np.ascontiguousarray(layer) for layer in array] if stacked else [array]
            parameters = [torch.nn.Parameter(torch.tensor(layer)) for layer in layers]
            for index, parameter in enumerate(parameters):
                self.register_parameter("__".join((*path, name, str(index))), parameter)
            result[name] = parameters if stacked else parameters[0]
        return result

    def forward(self, inputs: dict):
        token_table = self.tree["encoder"]["token_embedding"]
        states = self._encode(inputs)
        x = _rows_at(states, inputs["encoder_index"])
        if "decoder" in self.tree:
            x = self._decode(x, states.shape[1], inputs)
        masked = _rows_at(x, inputs["masked_slots"])
        return masked_loss(masked, inputs, lambda y: self._logits(y, token_table))

    def _encode(self, inputs: dict):
        encoder, length = self.tree["encoder"], inputs["ids"].shape[1]
        slots = inputs["encoder_slots"].clamp(max=length - 1)
        occupied = inputs["encoder_slots"] < length
        segments = inputs["segments"].gather(1, slots) * occupied
        positions = inputs["encoder_positions"] * occupied
        x = encoder["token_embedding"][inputs["encoder_ids"]]
        x = _norm(x + encoder["position_embedding"][positions], encoder["norm"])
        x = functional.dropout(x, self.model.dropout.hidden, self.training)
        x = x * (segments > 0)[:, :, None]
        bias = self._bias(segments, positions, encoder)
        rates = (self.model.dropout.hidden, self.model.dropout.attention)
        return self._stack(x, encoder["blocks"], self.model.encoder.layers, bias, *rates)

    def _decode(self, x, encoder_slots: int, inputs: dict):
        """The decoder on the encoder's states at visible slots, and [MASK] at masked ones."""
        decoder, settings = self.tree["decoder"], self.model.decoder
        mask_embedding = self.tree["encoder"]["token_embedding"][self.special.mask]
        visible = inputs["encoder_index"] < encoder_slots
        masked = inputs["masked_index"] < inputs["masked_slots"].shape[1]
        fill = masked if settings.refills_mask else masked & ~visible
        x = torch.where(fill[:, :, None], mask_embedding.to(x.dtype), x)
        x = _norm(x + decoder["position_embedding"][inputs["positions"]], decoder["norm"])
        segments = inputs["segments"] * (visible | masked)
        bias = self._bias(segments, inputs["positions"], decoder)
        x = x * (segments > 0)[:, :, None]
        return self._stack(x, decoder["blocks"], settings.layers, bias, 0.0, 0.0)

    def _stack(self, x, blocks: dict, layers: int, bias, rate: float, attention_rate: float):
        """Applies the layers in turn."""
        batch, length, width = x.shape
        drop = functools.partial(functional.dropout, p=rate, training=self.training)
        for index in range(layers):
            p = _of_layer(blocks, index)
            q, k, v = (
                _linear(x, p["attention"][name]).unflatten(2, (self.model.encoder.heads, -1))
                for name in ("query", "key", "value")
            )
            y = functional.scaled_dot_product_attention(
                *(part.transpose(1, 2) for part in (q, k, v)),
                attn_mask=bias.to(q.dtype),
                dropout_p=attention_rate if self.training else 0.0,
            )
            y = _linear(y.transpose(1, 2).reshape(batch, length, width), p["attention"]["out"])
            x = _norm(x + drop(y), p["attention_norm"])
            y = functional.gelu(_linear(x, p["feed_forward"]["up"]))
            x = _norm(x + drop(_linear(y, p["feed_forward"]["down"])), p["feed_forward_norm"])
        return x

    def _bias(self, segments, positions, module: dict):
        """What is added to attention scores, [B, 1 or H, T, T]."""
        visible = segments[:, :, None] == segments[:, None, :]
        visible = visible & (segments > 0)[:, None, :]
        bias = torch.zeros(visible.shape, device=visible.device)
        bias = bias.masked_fill(~visible, MASKED_OUT)[:, None]
        if "relative_bias" not in module:
            return bias
        middle = self.model.encoder.max_positions - 1
        distance = positions[:, None, :] - positions[:, :, None] + middle
        by_pair = module["relative_bias"]["table"][self.bucket[distance]]
        return bias + by_pair.permute(0, 3, 1, 2)

    def _logits(self, x, token_table):
        head = self.tree["head"]
        x = _norm(functional.gelu(_linear(x, head["dense"])), head["norm"])
        return functional.linear(x, token_table[: self.size], head["bias"][: self.size])


class Hidden(torch.nn.Module):
    """What a user of transformers would write: the attention mask hides masked positions.

    RobertaModel reads the whole row. [MASK] is put back before a decoder of RobertaLayers.
    """

    def __init__(self, model: config.Model, size: int, length: int, special: config.SpecialIds):
        super().__init__()
        self.special, settings = special, model.encoder
        shape = {
            "vocab_size": size,
            "hidden_size": settings.width,
            "num_attention_heads": settings.heads,
            "intermediate_size": settings.feed_forward,
            "max_position_embeddings": length + 2,
            "type_vocab_size": 1,
            "layer_norm_eps": LAYER_NORM_EPSILON,
            "attn_implementation": "sdpa",
        }
        encoder = transformers.RobertaConfig(
            num_hidden_layers=settings.layers,
            hidden_dropout_prob=model.dropout.hidden,
            attention_probs_dropout_prob=model.dropout.attention,
            **shape,
        )
        decoder = transformers.RobertaConfig(
            num_hidden_layers=model.decoder.layers,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **shape,
        )
        self.encoder = modeling_roberta.RobertaModel(encoder, add_pooling_layer=False)
        self.decoder = modeling_roberta.RobertaEncoder(decoder)
        self.positions = torch.nn.Embedding(length, settings.width)
        self.norm = torch.nn.LayerNorm(settings.width)
        self.head = modeling_roberta.RobertaLMHead(encoder)
        self.head.decoder.weight = self.encoder.embeddings.word_embeddings.weight

    def forward(self, inputs: dict):
        masked = inputs["masked_index"] < inputs["masked_slots"].shape[1]
        x = self.encoder(inputs["ids"], attention_mask=(~masked).long()).last_hidden_state
        if len(self.decoder.layer):
            table = self.encoder.embeddings.word_embeddings.weight
            x = torch.where(masked[:, :, None], table[self.special.mask].to(x.dtype), x)
            x = self.decoder(self.norm(x + self.positions.weight[None])).last_hidden_state
        slots = inputs["masked_slots"].clamp(max=x.shape[1] - 1)
        x = x.gather(1, slots[:, :, None].expand(-1, -1, x.shape[2]))
        return masked_loss(x, inputs, self.head)


def masked_loss(x, inputs: dict, logits: typing.Callable):
    """Mean cross-entropy at the masked slots that are not empty. `x` is [B, M, D]."""
    length = inputs["ids"].shape[1]
    valid = inputs["masked_slots"] < length
    targets = inputs["ids"].gather(1, inputs["masked_slots"].clamp(max=length - 1))
    # At a boolean index, whose shape depends on the data, torch.compile waits for the GPU.
    targets = torch.where(valid, targets, -100)
    return functional.cross_entropy(logits(x).flatten(0, 1).float(), targets.flatten())


def _of_layer(parameters: dict | list, index: int):
    """The parameters of one layer. Leaves of `parameters` are lists over the layers."""
    if isinstance(parameters, list):
        return parameters[index]
    return {name: _of_layer(part, index) for name, part in parameters.items()}


def _norm(x, p: dict):
    return functional.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], LAYER_NORM_EPSILON)


def _linear(x, p: dict):
    return functional.linear(x, p["kernel"], p["bias"])


def _rows_at(x, index):
    """Rows of x [B, N, D] at index [B, P]; zero where the index is N."""
    slots = index.clamp(max=x.shape[1] - 1)[:, :, None].expand(-1, -1, x.shape[2])
    return x.gather(1, slots) * (index < x.shape[1])[:, :, None].to(x.dtype)
