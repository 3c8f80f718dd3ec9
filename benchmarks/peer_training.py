"""Trains an encoder of Hugging Face transformers: one PyTorch arm of against_peers.py.

    taskset -c 1 python benchmarks/peer_training.py --arm=bert --inputs=runs/peers/inputs \
        --layers=4 --width=128 --batch_size=16 --learning_rate=1e-3 --steps=3000 \
        --warmup=150 --output=runs/bert

--inputs is the folder that against_peers.py writes: the rows, their order, the vocabulary and the
held-out rows with their masks. The arms:

bert         BertForMaskedLM as run_mlm.py trains it. 15% of the tokens are selected; of these, 80%
             become [MASK], 10% a random token, 10% stay. AdamW, and a learning rate that falls
             linearly to 0.
mpnet        MPNetForMaskedLM, trained in the same way.
modernbert   ModernBertForMaskedLM as its authors train it. 30% are selected, 80/10/10. AdamW with
             decoupled weight decay, and a trapezoidal rate, which falls over the last 10% of the
             steps as 1 - sqrt. Its own switch `sparse_prediction` computes
             the logits of selected tokens only.
bert_recipe  BertForMaskedLM with the mask rate (40%, always [MASK]), the optimizer (Muon for the
             matrices of the layers, AdamW for the rest) and the schedule (wsd) of
             recipes/efficient.gin.
modernbert_recipe  ModernBertForMaskedLM with the same. Its queries, keys and values are one matrix
             for Muon, and so are its two matrices of the feed-forward block.
modernbert_mask  As modernbert, but each selected token becomes [MASK], as it is scored.
modernbert_ours  As modernbert_recipe, with full attention in every layer and theta 10,000, as our
             recipes/modern_layers.gin. ModernBERT's config has windows of 64 tokens to each side in
             two of three layers, and theta 160,000 in the others.

All: no dropout, because most rows are read once or twice; gradients clipped to a global norm of 1
(2 in the recipe); scaled_dot_product_attention (MPNet has none); one thread; fused AdamW;
torch.compile where a C++ compiler is installed (6 to 10% faster steps). The stock BertForMaskedLM
and MPNetForMaskedLM compute the logits at every position. In bfloat16,
PyTorch computes under autocast.

Writes metrics.jsonl (a line every --log_every steps), checkpoints/<step>/ (stock folders with
tokenizer.json) and, at the end, peer.json: what was trained, and PyTorch's own loss on the first
held-out rows, against which the scores of the same weights in JAX are checked.
"""

import argparse
import json
import os
import pathlib
import re
import shutil

# Before torch is imported: one thread, no pool of compiling processes, and no programs of earlier
# runs, because compilation counts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import numpy as np
import torch
import transformers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKED_ROWS = 256  # held-out rows that PyTorch computes the loss of
DECAY_SHARE = 0.1  # of the steps, in which the trapezoidal and the wsd rate fall
# Of recipes/efficient.gin: Muon's learning rate is twice AdamW's.
MUON_FACTOR = 2.0


def main():
    """Trains, and writes what the module docstring names."""
    args = parse_flags()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rows = Rows(args.inputs, args.seed, args.batch_size)
    model = make_model(args, rows.special, rows.ids.shape[1]).to(DEVICE)
    model.train()
    compiled = torch.compile(model) if shutil.which("g++") else model
    optimizers = make_optimizers(args, model)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    metrics = (args.output / "metrics.jsonl").open("w")
    for step in range(args.steps):
        batch = rows.batch(step)
        inputs, labels = mask_tokens(batch, args.arm, rows.special)
        attention_mask = (batch != rows.special["pad"]).long()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = compiled(input_ids=inputs, attention_mask=attention_mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0 if is_recipe(args.arm) else 1.0)
        factor = rate_factor(args.arm, step, args.steps, args.warmup)
        for optimizer, of_groups in zip(optimizers, peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, of_groups, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % args.log_every == 0:
            metrics.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")
            metrics.flush()
        if (step + 1) % args.save_every == 0:
            save(model, args, step + 1)
    record = {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "compiled": compiled is not model,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "checked_rows": CHECKED_ROWS,
        "checked_loss": heldout_loss(model, args.inputs, rows.special),
    }
    (args.output / "peer.json").write_text(json.dumps(record, indent=1) + "\n")


class Rows:
    """The training rows in the order of the arm's seed, the same as in the arms in JAX."""

    def __init__(self, inputs: pathlib.Path, seed: int, batch_size: int):
        self.ids = np.load(inputs / "rows.npy", mmap_mode="r")
        self.order = np.load(inputs / f"order-{seed}.npy", mmap_mode="r")
        self.special = json.loads((inputs / "special.json").read_text())
        self.batch_size = batch_size

    def batch(self, step: int) -> torch.Tensor:
        """Returns the rows of a step, int64 [batch_size, length]."""
        first = step * self.batch_size
        chosen = np.take(self.order, range(first, first + self.batch_size))
        return torch.from_numpy(self.ids[chosen].astype(np.int64)).to(DEVICE)


def make_model(args: argparse.Namespace, special: dict, length: int) -> torch.nn.Module:
    """Creates the model with fresh weights, as its class draws them."""
    shape = {
        "vocab_size": special["size"],
        "hidden_size": args.width,
        "pad_token_id": special["pad"],
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "max_position_embeddings": length,
        "attn_implementation": "eager" if args.arm == "mpnet" else "sdpa",
        "initializer_range": args.initializer_range,
    }
    if not args.arm.startswith("modernbert"):
        shape |= {
            "intermediate_size": 4 * args.width,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
        if args.arm == "mpnet":  # its positions begin after the id of padding
            shape |= {"max_position_embeddings": length + special["pad"] + 1}
            return transformers.MPNetForMaskedLM(transformers.MPNetConfig(**shape))
        return transformers.BertForMaskedLM(transformers.BertConfig(**shape))
    if args.arm == "modernbert_ours":
        full = {"rope_type": "default", "rope_theta": 10_000.0}
        shape |= {
            "layer_types": ["full_attention"] * args.layers,
            "rope_parameters": {"full_attention": full, "sliding_attention": full},
        }
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            # Its feed-forward block has three matrices: as many parameters as BERT's with two.
            **shape,
            intermediate_size=8 * args.width // 3 // 8 * 8,
            sparse_prediction=True,
            bos_token_id=special["bos"],
            eos_token_id=special["eos"],
            cls_token_id=special["bos"],
            sep_token_id=special["eos"],
        )
    )


def mask_tokens(ids: torch.Tensor, arm: str, special: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and labels. It does what DataCollatorForLanguageModeling does.

    Args:
        ids: Rows, int64 [rows, length].
        arm: Decides how many tokens are selected, and what replaces them.
        special: Ids of special tokens, which are never selected.
    """
    rate = 0.15
    if arm.startswith("modernbert"):
        rate = 0.30
    if is_recipe(arm):
        rate = 0.40
    names = ("bos", "pad", "eos", "unk", "mask")
    never = torch.tensor([special[name] for name in names], device=DEVICE)
    selected = (torch.rand(ids.shape, device=DEVICE) < rate) & ~torch.isin(ids, never)
    labels = torch.where(selected, ids, -100)
    inputs = torch.where(selected, special["mask"], ids)
    if not is_recipe(arm) and arm != "modernbert_mask":
        kind = torch.rand(ids.shape, device=DEVICE)
        inputs = torch.where(
            selected & (kind < 0.2), torch.randint_like(ids, special["size"]), inputs
        )
        inputs = torch.where(selected & (kind < 0.1), ids, inputs)
    return inputs, labels


def make_optimizers(args: argparse.Namespace, model: torch.nn.Module) -> list:
    """Returns the optimizers of the arm. Their rates are the peaks."""
    parameters = dict(model.named_parameters())
    if is_recipe(args.arm):
        matrices = {
            name: parameter
            for name, parameter in parameters.items()
            if re.search(r"\.layers?\.", name) and parameter.ndim == 2
        }
        others = [value for name, value in parameters.items() if name not in matrices]
        muon = torch.optim.Muon(
            matrices.values(),
            lr=MUON_FACTOR * args.learning_rate,
            weight_decay=0.01,
            adjust_lr_fn="match_rms_adamw",
        )
        adamw = torch.optim.AdamW(
            others,
            lr=args.learning_rate,
            betas=(0.9, 0.98),
            eps=1e-6,
            weight_decay=0.01,
            fused=True,
        )
        return [muon, adamw]
    decay, betas, epsilon = 0.01, (0.9, 0.999), 1e-8
    if args.arm.startswith("modernbert"):
        decay, betas, epsilon = 1e-5 / args.learning_rate, (0.9, 0.98), 1e-6
    groups = [
        {"params": [p for p in parameters.values() if p.ndim == 2], "weight_decay": decay},
        {"params": [p for p in parameters.values() if p.ndim != 2], "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=epsilon, fused=True)]


def rate_factor(arm: str, step: int, steps: int, warmup: int) -> float:
    """Returns the learning rate of a step, counted from 0, as a share of its peak."""
    if step < warmup:
        return (step + 1) / warmup
    if arm in ("bert", "mpnet"):
        return (steps - step) / (steps - warmup)
    left = min((steps - step) / (DECAY_SHARE * steps), 1.0)
    return left if is_recipe(arm) else 1 - (1 - left) ** 0.5


def is_recipe(arm: str) -> bool:
    """Returns whether the arm has the settings of recipes/efficient.gin."""
    return arm.endswith(("_recipe", "_ours"))


def save(model: torch.nn.Module, args: argparse.Namespace, step: int):
    """Writes the model as a stock folder with its tokenizer."""
    folder = args.output / "checkpoints" / str(step)
    model.save_pretrained(folder)
    shutil.copy(args.inputs / "tokenizer.json", folder)


def heldout_loss(model: torch.nn.Module, inputs: pathlib.Path, special: dict) -> float:
    """Returns PyTorch's loss in nats at the masked tokens of the first held-out rows."""
    with np.load(inputs / "heldout.npz") as heldout:
        ids = torch.from_numpy(heldout["ids"][:CHECKED_ROWS].astype(np.int64)).to(DEVICE)
        masked = torch.from_numpy(heldout["masked"][:CHECKED_ROWS]).to(DEVICE)
    model.eval()
    total = 0.0
    with torch.no_grad():
        for part, at in zip(ids.split(32), masked.split(32), strict=True):
            loss = model(
                input_ids=torch.where(at, special["mask"], part),
                attention_mask=(part != special["pad"]).long(),
                labels=torch.where(at, part, -100),
            ).loss
            total += loss.item() * int(at.sum())
    return total / int(masked.sum())


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modernbert = ("modernbert", *(f"modernbert_{kind}" for kind in ("recipe", "mask", "ours")))
    arms = ("bert", "mpnet", "bert_recipe", *modernbert)
    flags.add_argument("--arm", choices=arms, required=True)
    flags.add_argument("--inputs", type=pathlib.Path, required=True, help="prepared inputs")
    flags.add_argument("--output", type=pathlib.Path, required=True, help="folder to write")
    flags.add_argument("--steps", type=int, required=True, help="length of the run")
    flags.add_argument("--warmup", type=int, required=True, help="steps until the peak rate")
    flags.add_argument("--layers", type=int, default=4)
    flags.add_argument("--width", type=int, default=128)
    flags.add_argument("--heads", type=int, default=4)
    flags.add_argument("--batch_size", type=int, default=16, help="rows of a step")
    flags.add_argument("--learning_rate", type=float, default=1e-3, help="peak, of AdamW")
    flags.add_argument("--initializer_range", type=float, default=0.02, help="of the weights")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--log_every", type=int, default=10, help="steps between lines of metrics")
    flags.add_argument("--save_every", type=int, default=10**9, help="steps between checkpoints")
    args = flags.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
