"""Compare the training step with two PyTorch implementations, interleaved in one process.

Prints the tokens/s of each implementation, and their ratios to ours. Needs the extra [torch].

    python benchmarks/against_torch.py --gin_file=tiny.gin --gin.Model.dtype=float32 \\
        --gin.Model.attention_dropout=0.0

hidden    The code that a user of transformers would write. RobertaModel reads the whole row, and
          the attention mask hides the masked positions. [MASK] is put back before a decoder of
          RobertaLayers; the head reads the masked positions. There is no relative bias.
gathered  The same computation as ours in plain PyTorch: gathered visible tokens, relative bias,
          scaled_dot_product_attention. With our weights and without dropout, its loss must equal
          ours before anything is timed. The relative tolerance is 1e-4 (1e-2 unless float32).

All three do forward, backward, clipping and AdamW (fused in PyTorch) with the same dropout rates.
On CPU, PyTorch computes in float32; on CUDA, it uses bfloat16 autocast and torch.compile. Rows are
random ids of one segment without padding. Our step draws its masks. PyTorch's masks are drawn
before, which is in its favour.

The first step of a turn is not timed. Our step returns its memory after each step and takes it
again in the next. After a pause, a virtual machine may have given that memory to its host, so the
first step is slower than in training.
"""

import functools
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the device is shared with PyTorch
# PyTorch's threads must not spin while ours work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from maelm_jax import cli, config  # noqa: E402


def main(argv: list[str]):
    flags = cli.parser(__doc__)
    flags.add_argument("--rounds", type=int, default=5, help="times that every step gets its turn")
    flags.add_argument("--steps", type=int, default=3, help="steps timed in a turn")
    args, experiment = cli.parse(flags, argv)

    import jax
    import numpy as np
    import torch

    from maelm_jax.model import loss, maelm, masking
    from maelm_jax.training import optimizer, sharding, step

    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    size, run, length = (
        experiment.vocabulary.size,
        experiment.run,
        experiment.corpus.sequence_length,
    )
    special = config.SpecialIds(0, 1, 2, 3, size - 1)
    graph, init = maelm.create(experiment.model, size, special)
    updates = optimizer.create(experiment.optimizer, run.train_steps)
    state = step.create_state(init, updates, run.seed, mesh)
    train_step = step.make_train_step(
        step.pretraining_loss(experiment, graph, special),
        updates,
        state,
        run.seed,
        run.accumulate,
        mesh,
    )
    ids = np.random.default_rng(0).integers(4, size - 1, (run.batch_size, length)).astype(np.int32)
    ids[:, 0] = special.bos
    batch = sharding.shard_batch(ids, mesh)

    sizes = masking.budget(experiment.masking, length)
    draw = jax.jit(
        lambda key: masking.draw(
            jax.random.split(key, run.batch_size), ids, experiment.masking, sizes, special
        )
    )
    device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    torch.manual_seed(0)
    patterns = [
        {
            name: torch.tensor(np.asarray(value), dtype=torch.long, device=device)
            for name, value in draw(jax.random.key(i))._asdict().items()
        }
        for i in range(4)
    ]
    weights = jax.device_get(state.params)
    gathered = Gathered(weights, experiment.model, size, special).to(device)
    hidden = hidden_by_mask(experiment.model, size, length, special).to(device)

    sums = loss.masked_cross_entropy(
        maelm.apply(graph, state.params).predict(draw(jax.random.key(0))), draw(jax.random.key(0))
    )
    expected = float(sums.loss / sums.count)
    with torch.no_grad():
        found = float(gathered.eval()(patterns[0]))
    if abs(found - expected) > 1e-4 * abs(expected) * (
        1 if experiment.model.dtype == "float32" else 100
    ):
        raise config.RunError(
            f"the PyTorch step computes something else: loss {found:.6f}, ours {expected:.6f}"
        )
    print(f"loss on the same weights and masks: ours {expected:.6f}, gathered {found:.6f}")

    def ours():
        nonlocal state
        state, _ = train_step(state, batch)
        return lambda: jax.block_until_ready(state)

    contenders = {"ours": ours} | {
        name: torch_step(module, patterns, experiment, device)
        for name, module in (("gathered", gathered), ("hidden", hidden))
    }
    for contender in contenders.values():  # compilation and PyTorch's first allocations
        for _ in range(2):
            contender()()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, contender in contenders.items():
            contender()()
            start = time.perf_counter()
            for _ in range(args.steps):
                wait = contender()
            wait()
            seconds[name].append((time.perf_counter() - start) / args.steps)

    model, tokens = experiment.model, run.batch_size * length
    print(
        f"{model.layers}+{model.decoder_layers} x {model.width}, vocabulary {size}, length "
        f"{length}, batch {run.batch_size}, {model.dtype}, "
        f"dropout {model.dropout}, attention dropout {model.attention_dropout}, {device}, torch "
        f"{torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"{'step':<10}{'tokens/s':>12}{'slowest':>12}{'fastest':>12}{'ours is':>10}")
    mine = statistics.median(seconds["ours"])
    for name, times in seconds.items():
        rates = [tokens / value for value in (statistics.median(times), max(times), min(times))]
        print(
            f"{name:<10}"
            + "".join(f"{rate:>12,.0f}" for rate in rates)
            + f"{statistics.median(times) / mine:>9.2f}x"
        )


def torch_step(module, patterns: list[dict], experiment: config.Experiment, device: str):
    """Makes a function that starts one optimiser step and returns a function that waits for it."""
    import torch

    settings = experiment.optimizer
    module.train()
    forward = torch.compile(module) if device == "cuda" else module
    adam = torch.optim.AdamW(
        module.parameters(), lr=1e-4, betas=(settings.b1, settings.b2), eps=settings.eps, fused=True
    )
    count = 0

    def one():
        nonlocal count
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            value = forward(patterns[count % len(patterns)])
        value.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
        adam.step()
        adam.zero_grad(set_to_none=True)
        count += 1
        return torch.cuda.synchronize if device == "cuda" else lambda: None

    return one


@functools.cache
def _torch():
    import torch

    return torch, torch.nn.functional


def Gathered(weights: dict, settings: config.Model, size: int, special: config.SpecialIds):
    """Our model with our parameters as a torch Module, whose forward(inputs) is the mean loss.

    This is a function and not a class, so that `--help` needs no torch.
    """
    import numpy as np

    from maelm_jax.model.positions import MASKED_OUT, bucket_of_distance

    torch, functional = _torch()
    heads, rate, attention_rate = settings.heads, settings.dropout, settings.attention_dropout

    def norm(x, p):
        return functional.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], 1e-5)

    def linear(x, p):
        return functional.linear(x, p["kernel"], p["bias"])

    def rows_at(x, index):
        """Rows of x [B, N, D] at index [B, P]; zero where the index is N."""
        found = x.gather(1, index.clamp(max=x.shape[1] - 1)[:, :, None].expand(-1, -1, x.shape[2]))
        return found * (index < x.shape[1])[:, :, None].to(x.dtype)

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tree = self._register(weights, ())
            self.register_buffer(
                "bucket", torch.tensor(bucket_of_distance(settings)).long(), persistent=False
            )

        def _register(self, tree, path):
            result = {}
            for name, value in tree.items():
                if isinstance(value, dict):
                    result[name] = self._register(value, (*path, name))
                    continue
                array = np.array(value)
                layered = "blocks" in path
                if name == "kernel":  # [in, out] -> PyTorch's [out, in]
                    array = array.swapaxes(-1, -2)
                parts = [np.ascontiguousarray(part) for part in array] if layered else [array]
                parameters = [torch.nn.Parameter(torch.tensor(part)) for part in parts]
                for index, parameter in enumerate(parameters):
                    self.register_parameter("__".join((*path, name, str(index))), parameter)
                result[name] = parameters if layered else parameters[0]
            return result

        def layer(self, blocks, index):
            return {
                name: {key: value[index] for key, value in part.items()}
                for name, part in blocks.items()
            }

        def stack(self, x, blocks, count, bias, dropout):
            batch, length, width = x.shape
            drop = functools.partial(
                functional.dropout, p=rate if dropout else 0.0, training=self.training
            )
            for index in range(count):
                p = self.layer(blocks, index)
                q, k, v = (
                    linear(x, p[name]).view(batch, length, heads, -1).transpose(1, 2)
                    for name in ("query", "key", "value")
                )
                y = functional.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=bias.to(q.dtype),
                    dropout_p=attention_rate if dropout and self.training else 0.0,
                )
                x = norm(
                    x + drop(linear(y.transpose(1, 2).reshape(batch, length, width), p["out"])),
                    p["attention_norm"],
                )
                x = norm(
                    x + drop(linear(functional.gelu(linear(x, p["up"])), p["down"])),
                    p["output_norm"],
                )
            return x

        def bias(self, segments, positions, table):
            same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
            bias = torch.zeros(same.shape, device=same.device).masked_fill(~same, MASKED_OUT)[
                :, None
            ]
            if table is None:
                return bias
            distance = positions[:, None, :] - positions[:, :, None] + settings.max_positions - 1
            return bias + table[self.bucket[distance]].permute(0, 3, 1, 2)

        def forward(self, inputs):
            encoder, decoder, head = (
                self.tree["encoder"],
                self.tree.get("decoder"),
                self.tree["head"],
            )
            length = inputs["ids"].shape[1]
            slots = inputs["encoder_slots"].clamp(max=length - 1)
            read = inputs["encoder_slots"] < length
            segments, positions = (
                inputs["segments"].gather(1, slots) * read,
                inputs["encoder_positions"] * read,
            )
            table = encoder["token_embedding"]
            x = table[inputs["encoder_ids"]] + encoder["position_embedding"][positions]
            x = (
                functional.dropout(norm(x, encoder["norm"]), rate, self.training)
                * (segments > 0)[:, :, None]
            )
            bias = self.bias(
                segments,
                positions,
                encoder["relative_bias"]["table"] if "relative_bias" in encoder else None,
            )
            x = self.stack(x, encoder["blocks"], settings.layers, bias, True)
            visible = x.shape[1]
            x = rows_at(x, inputs["encoder_index"])
            if decoder is not None:
                known = inputs["encoder_index"] < visible
                masked = inputs["masked_index"] < inputs["masked_slots"].shape[1]
                x = torch.where((masked & ~known)[:, :, None], table[special.mask].to(x.dtype), x)
                x = norm(x + decoder["position_embedding"][inputs["positions"]], decoder["norm"])
                segments = inputs["segments"] * (known | masked)
                bias = self.bias(
                    segments,
                    inputs["positions"],
                    decoder["relative_bias"]["table"] if "relative_bias" in decoder else None,
                )
                x = self.stack(
                    x * (segments > 0)[:, :, None],
                    decoder["blocks"],
                    settings.decoder_layers,
                    bias,
                    False,
                )
            return masked_loss(
                rows_at(x, inputs["masked_slots"]), inputs, lambda y: self.logits(y, head, table)
            )

        def logits(self, x, head, table):
            x = norm(functional.gelu(linear(x, head["dense"])), head["norm"])
            return functional.linear(x, table[:size], head["bias"][:size])

    return Module()


def masked_loss(x, inputs: dict, logits):
    """Mean cross-entropy at the masked slots that are not empty. `x` is [B, M, D]."""
    _, functional = _torch()
    length = inputs["ids"].shape[1]
    valid = inputs["masked_slots"] < length
    targets = inputs["ids"].gather(1, inputs["masked_slots"].clamp(max=length - 1))
    return functional.cross_entropy(logits(x[valid]).float(), targets[valid])


def hidden_by_mask(settings: config.Model, size: int, length: int, special: config.SpecialIds):
    """Model with transformers' RoBERTa as encoder, its layers as decoder, and its head."""
    import transformers
    from transformers.models.roberta import modeling_roberta

    torch, _ = _torch()
    shape = {
        "vocab_size": size, "hidden_size": settings.width, "num_attention_heads": settings.heads,
        "intermediate_size": settings.feed_forward, "max_position_embeddings": length + 2,
        "type_vocab_size": 1, "layer_norm_eps": 1e-5, "attn_implementation": "sdpa",
    }  # fmt: skip
    deep = transformers.RobertaConfig(
        num_hidden_layers=settings.layers,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.attention_dropout,
        **shape,
    )
    shallow = transformers.RobertaConfig(
        num_hidden_layers=settings.decoder_layers,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **shape,
    )

    class Hidden(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = modeling_roberta.RobertaModel(deep, add_pooling_layer=False)
            self.decoder = modeling_roberta.RobertaEncoder(shallow)
            self.positions = torch.nn.Embedding(length, settings.width)
            self.norm = torch.nn.LayerNorm(settings.width)
            self.head = modeling_roberta.RobertaLMHead(deep)
            self.head.decoder.weight = self.encoder.embeddings.word_embeddings.weight

        def forward(self, inputs):
            masked = inputs["masked_index"] < inputs["masked_slots"].shape[1]
            x = self.encoder(inputs["ids"], attention_mask=(~masked).long()).last_hidden_state
            if settings.decoder_layers:
                row = self.encoder.embeddings.word_embeddings.weight[special.mask].to(x.dtype)
                x = self.norm(torch.where(masked[:, :, None], row, x) + self.positions.weight[None])
                x = self.decoder(x).last_hidden_state
            slots = inputs["masked_slots"].clamp(max=x.shape[1] - 1)
            return masked_loss(
                x.gather(1, slots[:, :, None].expand(-1, -1, x.shape[2])), inputs, self.head
            )

    return Hidden()


if __name__ == "__main__":
    cli.run(main)
