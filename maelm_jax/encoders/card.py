"""Writes the model card of an exported folder: how to load it, its settings and measured results.

Every figure comes from the files of the run.
"""

import dataclasses

from maelm_jax import config

# {export format: Markdown about loading the folder}. `render` fills in the names.
LOADING = {
    "huggingface": """```python
import torch
from transformers import {auto}, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{name}"), {auto}.from_pretrained("{name}").eval()
with torch.no_grad():
    output = model(**tokenizer(["A sentence."], return_tensors="pt"))
```

Use `{output}`.{pooler} `{mask}` and the other special tokens are recognised in a \
text.{training}""",
    "pytorch": """```python
import torch
{tokenizer}
from maelm import MaeLm  # the file in this folder

model = MaeLm.from_folder("{name}").eval()
ids = torch.tensor([{ids}])
with torch.no_grad():
    states = model(ids)
```

The file says the rest: it holds encoder, decoder and prediction head, and needs torch and \
safetensors only.""",
    "reference": """`model.pt` has the layout of the checkpoints of the published implementation \
(yumeng5/MAE-LM): `args` with the architecture,
`model` with the state dict and its tied copies. It holds no training state. The implementation \
itself has not been run on this file.""",
}

# Of a pytorch export with tokenizer.json: the import and the ids of a sentence.
TOKENIZER_JSON = (
    "from tokenizers import Tokenizer",
    'Tokenizer.from_file("{name}/tokenizer.json").encode("A sentence.").ids',
)
# The same of one without, whose vocabulary has no equal Hugging Face tokenizer.
SENTENCEPIECE = (
    "from sentencepiece import SentencePieceProcessor",
    '[{bos}, *SentencePieceProcessor("{name}/sentencepiece.model").encode("A sentence."), {eos}]',
)
NO_POOLER = (
    " transformers may report that weights of a pooler are missing. This encoder has no pooler."
)
SPECIAL_IN_TRAINING = (
    " In training, such\na string was ordinary text. `tokenizer(text, split_special_tokens=True)` "
    "gives the ids of training."
)


def objective(experiment: config.Experiment) -> str:
    """Returns one sentence about the pretraining objective."""
    masking, model = experiment.masking, experiment.model
    rates = [rate for _, rate in masking.rate_plateaus] or [masking.rate]
    unit = {"token": "", "word": ", by whole words", "span": ", in spans"}[masking.unit]
    rate = f"{', then '.join(f'{rate:.0%}' for rate in rates)} of the tokens are masked{unit}"
    if masking.random_fraction or masking.keep_fraction:
        rate += (
            f" ({masking.random_fraction:.0%} of these become random tokens and "
            f"{masking.keep_fraction:.0%} stay as they are where the encoder reads them)"
        )
    if model.decoder_layers == 0:
        return f"masked language modelling (MLM): {rate}, each of them in the encoder's input"
    layers = (
        f"a decoder of {model.decoder_layers} layer(s) puts [MASK] back "
        "and is not part of the encoder"
    )
    if masking.encoder_mask_fraction == 0:
        return (
            f"MAE-LM (arXiv 2302.02060): {rate}, none of them seen by the encoder in any form; "
            f"{layers}"
        )
    return (
        f"between MAE-LM and MLM: {rate}, {masking.encoder_mask_fraction:.0%} of them in "
        f"the encoder's input; {layers}"
    )


def verification(format: str, reports: list[dict] | None, unverified: str) -> str:
    """Returns one sentence about what the export compared after it wrote the folder."""
    if reports is None:
        return f"Not verified when this was written: {unverified}."
    if format == "reference":
        return (
            "torch.load reads the same numbers from `model.pt` as were written. "
            "No function was computed with them."
        )
    reader = (
        "transformers: the tokenizer's ids are the same, and"
        if format == "huggingface"
        else "maelm.py:"
    )
    listed = [
        f"{item['of']} {item['largest_difference']:.2g} (largest value {item['largest_value']:.3g})"
        for item in reports
    ]
    compared = (
        "the model was compared with the JAX model on real text, float32; largest differences"
    )
    return f"Read back with {reader} {compared}: {'; '.join(listed)}."


@dataclasses.dataclass(frozen=True)
class About:
    """The facts that a model card states.

    Attributes:
        name: The name of the exported folder.
        format: The export format, one of `maelm_jax.export.FORMATS`.
        architecture: The class or layout that loads the folder.
        parameters: The number of parameters in the folder.
        model: The settings of the model.
        origin: The workdir, or the path of another encoder.
        experiment: The settings of the run; None for an encoder that is not a workdir.
        step: The step of the checkpoint; None for an encoder that is not a workdir.
        lines: The lines of metrics.jsonl.
        results: The results.json of a fine-tuned run; empty for a pretraining run.
        reports: The comparisons of the verification; None if there was none.
        unverified: Why there was no verification.
        length: The longest input in tokens whose positions are trained.
        mask: The text of [MASK].
        special: The special ids.
        has_tokenizer_json: Whether the folder has a tokenizer.json.
        has_pooler: Whether a pooler that came with the encoder is in the folder.
    """

    name: str
    format: str
    architecture: str
    parameters: int
    model: config.Model
    origin: str
    experiment: config.Experiment | None
    step: int | None
    lines: list[dict]
    results: dict
    reports: list[dict] | None
    unverified: str
    length: int
    mask: str
    special: config.SpecialIds
    has_tokenizer_json: bool
    has_pooler: bool


def pretraining(about: About) -> dict[str, str]:
    """Returns the table entries of a pretraining run: {name: text}."""
    run, corpus = about.experiment.run, about.experiment.corpus
    sizes = ", then ".join(str(size) for _, size in run.named_batch_sizes)
    lines = [line for line in about.lines if line["step"] <= about.step]
    losses = [
        f"{line['loss']:.4f} (batch of step {line['step']})" for line in lines if "loss" in line
    ][-1:]
    evaluated = [line for line in lines if "eval_loss" in line][-1:]
    losses += [
        f"held-out, at mask rate {about.experiment.evaluated.masking.rate:g}, "
        f"{line['eval_loss']:.4f} with accuracy {line['eval_accuracy']:.3f} (step "
        f"{line['step']})"
        for line in evaluated
    ]
    trained = "positions past that were not trained"
    if about.length > corpus.sequence_length:
        trained = (
            "that of the encoder it started from; "
            f"this run trained the first {corpus.sequence_length} positions"
        )
    return {
        "objective": objective(about.experiment),
        "corpus": "; ".join(f"`{source}` {rate:.0%}" for source, rate in corpus.rates.items()),
        "started from": f"`{run.init_from}`" if run.init_from else "random weights",
        "steps": f"{about.step:,} of {run.train_steps:,}, each of {sizes} rows "
        f"of {corpus.sequence_length} tokens",
        "loss, nats a predicted token": "; ".join(losses) or "not recorded",
        "longest input": f"{about.length} tokens: {trained}",
    } | averaged(about.experiment.optimizer)


def averaged(optimizer: config.Optimizer) -> dict[str, str]:
    """Returns the table entry about averaged parameters, if they are averaged."""
    if not optimizer.ema_decay:
        return {}
    average = f"a moving average over the steps, decay {optimizer.ema_decay:g}"
    return {"averaging": f"the parameters are {average}"}


def fine_tuning(about: About) -> dict[str, str]:
    """Returns the table entries of a fine-tuned run: {name: text}.

    They also state where the stock class computes something else than training did.
    """
    results = about.results
    rows = {
        "fine-tuned on": str(results.get("task", "not recorded")),
        "started from": f"`{results.get('init_from', 'not recorded')}`",
        "steps": f"{about.step:,}",
        "score": f"{results['main_metric']} {results['score']:.4f} on the development set "
        f"({', '.join(results['evaluated_on'].values())})"
        if results.get("score") is not None
        else "not recorded",
    }
    if about.architecture.endswith("QuestionAnswering"):
        rows["logits"] = (
            "also at the question, the separators and padding, where no answer can begin or end: "
            "training ruled these out, the class does not"
        )
        threshold = results.get("best", {}).get("best_f1_threshold")
        if threshold is not None:  # SQuAD 2.0
            rows["no answer"] = (
                "if the score of the first token minus that of the best span is above "
                f"{threshold:.7g}. A score is the start logit plus the end logit"
            )
    elif about.architecture.endswith("TokenClassification"):
        rows["logits"] = (
            "the label of a word is that of its first token. Give the words as one text with a "
            "space between two: with `is_split_into_words=True`, a byte-level tokenizer gives "
            "other ids than in training"
        )
    elif results.get("label_separator") is not None:
        rows["logits"] = "one for each label. A text has the labels whose logit is above 0"
    elif not results.get("labels"):
        rows["output"] = "the score as it was trained, from 0 to 1 (STS-B: score / 5)"
        if results.get("task") == "own":
            low, high = about.experiment.finetune.custom.score_range
            rows["output"] += f"; a score of the files is {low:.7g} + output * {high - low:.7g}"
    return rows


def positions(model: config.Model) -> str:
    """Returns the kind of positions that attention reads, in words."""
    if model.positions == "rotary":
        local = f", local attention {model.local_attention}" if model.local_attention else ""
        return f"rotary positions{local}"
    if model.relative_buckets == "none":
        return "no relative positions"
    return f"{model.relative_buckets} buckets {model.num_buckets}/{model.max_distance}"


def render(about: About) -> str:
    """Returns the model card as Markdown."""
    model = about.model
    shape = (
        f"{model.layers} layers of width {model.width}, {model.heads} heads, "
        f"feed-forward {model.feed_forward}, {positions(model)}"
    )
    rows = {
        "architecture": f"{about.architecture}: {shape}",
        "parameters": f"{about.parameters:,} in this folder",
    }
    if about.experiment is None:
        rows |= {"converted from": f"`{about.origin}`", "longest input": f"{about.length} tokens"}
    else:
        rows |= fine_tuning(about) if about.results else pretraining(about)
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    made = "trained" if about.experiment else "converted"
    is_mae_lm = about.experiment and about.model.decoder_layers and not about.results
    tags = "tags: [mae-lm]\n" if is_mae_lm else ""
    front = ""
    if about.format == "huggingface":
        front = f"---\nlibrary_name: transformers\n{tags}---\n\n"
    heads = {
        "MaskedLM": "logits",
        "SequenceClassification": "logits",
        "TokenClassification": "logits",
        "QuestionAnswering": "start_logits` and `output.end_logits",
    }
    head = next((name for name in heads if about.architecture.endswith(name)), "")
    auto, output = (
        f"AutoModelFor{head}" if head else "AutoModel",
        heads.get(head, "last_hidden_state"),
    )
    tokenizer, ids = TOKENIZER_JSON if about.has_tokenizer_json else SENTENCEPIECE
    loading = LOADING[about.format].format(
        name=about.name,
        tokenizer=tokenizer,
        ids=ids.format(name=about.name, bos=about.special.bos, eos=about.special.eos),
        auto=auto,
        output=f"output.{output}",
        mask=about.mask,
        pooler="" if head or about.has_pooler else NO_POOLER,
        training=SPECIAL_IN_TRAINING if about.experiment else "",
    )
    return (
        f"{front}# {about.name}\n\nA text encoder {made} with maelm_jax.\n\n"
        f"| | |\n|---|---|\n{table}\n\n## Loading\n\n{loading}\n\n"
        f"## Verification\n\n{verification(about.format, about.reports, about.unverified)}\n"
    )
