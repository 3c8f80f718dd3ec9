"""Writes the model card of an exported folder: how to load it, its settings and measured results.

Every figure comes from the files of the run.
"""

import json
import pathlib
import string
import typing

from maelm_jax import config, tables
from maelm_jax.encoders import decoder_file, verify
from maelm_jax.encoders.export import Written, find_causal_class
from maelm_jax.encoders.opened import OpenedModel
from maelm_jax.encoders.results import CONFUSION, Results
from maelm_jax.training import metrics

CARD = string.Template("""\
# $name

A text encoder $made with maelm_jax.

| | |
|---|---|
$table
$classes
## Loading

$loading

$use## Verification

$verification
""")

CLASSES = string.Template("""
## Classes

On $evaluated_on:

$tables
""")
# {export format: about loading the folder}.
LOADING = {
    "huggingface": string.Template("""\
```python
import torch
from transformers import $auto, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("$name")
model = $auto.from_pretrained("$name").eval()
with torch.no_grad():
    output = model(**tokenizer(["A sentence."], truncation=True, return_tensors="pt"))
```

Use `$output`.$notes The tokenizer reads `$mask`, `$bos` and its other special tokens in a text as \
tokens. maelm_jax reads them as text, as `tokenizer(text, split_special_tokens=True)` does.

ONNX (`pip install onnx onnxscript onnxruntime`), after the lines above:

```python
import onnxruntime

example = tokenizer(["A sentence.", "Two."], padding=True, return_tensors="pt")
inputs = {name: example[name] for name in ("input_ids", "attention_mask")}
axes = {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in inputs}
torch.onnx.export(
    model, (), "model.onnx", kwargs=inputs, output_names=[$names], dynamic_shapes=axes,
    dynamo=True, external_data=False,
)
session = onnxruntime.InferenceSession("model.onnx")
output = session.run(None, {name: value.numpy() for name, value in inputs.items()})
```

transformers.js, with that file as `$name/onnx/model.onnx`:

```js
import { AutoModel, AutoTokenizer, env } from "@huggingface/transformers";

env.localModelPath = "./"; // the folder that holds $name
env.allowRemoteModels = false;
const tokenizer = await AutoTokenizer.from_pretrained("$name");
const model = await AutoModel.from_pretrained("$name", { dtype: "fp32" });
const { input_ids, attention_mask } = tokenizer(["A sentence."], { truncation: true });
const output = await model({ input_ids, attention_mask });
```"""),
    "reference": string.Template("""\
`model.pt` has the layout of the checkpoints of the published implementation (yumeng5/MAE-LM): \
`args` with the architecture, `model` with the state dict and its tied copies. It holds no \
training state. The implementation itself has not been run on this file."""),
}
NO_POOLER = " If the class has a pooler, `pooler_output` and its weights are not trained."
# How to predict and to score with each kind of model: {pipeline_tag: text}.
USE = {
    "fill-mask": string.Template("""\
## Predicting and scoring

```python
from transformers import AutoModelForMaskedLM, pipeline

pipeline("fill-mask", model="$name"$trust)("The value is $mask.")
model = AutoModelForMaskedLM.from_pretrained("$name"$trust)
```

$decoder`model` gives logits at every token. Read those at `$mask`. A pseudo-log-likelihood masks \
each token in turn, as `minicons.scorer.MaskedLMScorer("$name", "cpu"$trust)` does.$causal

"""),
    "text-generation": string.Template("""\
## Scoring

Each token reads those before it, because config.json has `is_decoder`. The logits at a token are \
those of the next one, as `minicons.scorer.IncrementalLMScorer("$name", "cpu")` reads them.

"""),
    "text-classification": string.Template("""\
## Classifying

```python
from transformers import pipeline

classify = pipeline("text-classification", model="$name"$all)
classify("A sentence.")  # two sentences: classify({"text": "One.", "text_pair": "Two."})
```

"""),
    "token-classification": string.Template("""\
## Labelling words

```python
words = "These are the words of a sentence .".split()
inputs = tokenizer(" ".join(words), return_offsets_mapping=True, return_tensors="pt")
ends = inputs.pop("offset_mapping")[0, :, 1]
with torch.no_grad():
    labels = model(**inputs).logits[0].argmax(-1)
start, labelled = 0, []
for word in words:  # its first token can be that of the space before it
    first = int((ends >= max(start, 1)).int().argmax())
    labelled.append((word, model.config.id2label[int(labels[first])]))
    start += len(word) + 1
```

"""),
}
# Of a model that has learned next tokens too, with and without a stock class for them.
CAUSAL = string.Template(
    " The model has learned next tokens too. "
    '`AutoModelForCausalLM.from_pretrained("$name", is_decoder=True)` predicts them from those '
    "before."
)
NO_CAUSAL = string.Template(
    " The model has learned next tokens too, but no class of transformers reads it left to right. "
    "`python -m maelm_jax.evaluate --models=$name --left_to_right` does."
)
DECODER = string.Template(
    "The decoder and its head are in $file. modeling_mae_lm.py, which `trust_remote_code` runs, "
    "hides `$mask` from the encoder and gives it to the decoder. "
)
NO_TOKENIZER = string.Template(
    " There is no tokenizer.json, because no Hugging Face tokenizer gives this vocabulary's ids: "
    "instead of `AutoTokenizer`, use `SentencePieceProcessor` with `$name/sentencepiece.model`, "
    "and put the id $bos before and $eos after those of a text."
)
# {end of the name of a stock class: its task on the Hub}.
PIPELINES = {
    "MaskedLM": "fill-mask",
    "CausalLM": "text-generation",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
}
# {task of fine-tuning: the data set on the Hub}. The other tasks of GLUE are in GLUE.
DATASETS = {"squad1": "rajpurkar/squad", "squad2": "rajpurkar/squad_v2"}
GLUE, GLUE_TASKS = "nyu-mll/glue", "cola sst2 mrpc stsb qqp mnli qnli rte wnli".split()
# {end of the name of a stock class: its outputs that a user reads}.
OUTPUTS = {
    "MaskedLM": ("logits",),
    "CausalLM": ("logits",),
    "SequenceClassification": ("logits",),
    "TokenClassification": ("logits",),
    "QuestionAnswering": ("start_logits", "end_logits"),
}
# Where the stock class computes something else than training did.
SPANS = (
    "also at the question, the separators and padding, where no answer can begin or end: training "
    "ruled these out, the class does not"
)
WORDS = (
    "the label of a word is that of its first token, or of the space before it where this space is "
    "a token. Give the words as one text with a space "
    "between two: with `is_split_into_words=True`, a byte-level tokenizer gives other ids than in "
    "training"
)


def render(
    format: str,
    name: str,
    encoder: OpenedModel,
    written: Written,
    has_tokenizer_json: bool,
    verification: list[verify.Report] | str,
    metadata: dict[str, typing.Any] | None = None,
) -> str:
    """Returns the model card of the folder `name` as Markdown.

    `verification` has the comparisons with JAX, or says why there were none. `metadata` are entries
    for the Hub that the run does not know, such as the license.
    """
    own, vocabulary = encoder.model.encoder, encoder.vocabulary
    has_decoder, buckets = decoder_file.is_in(encoder), own.relative_buckets
    rows = {
        "architecture": f"{written.architecture}: {own.layers} layers of width {own.width}, "
        f"{own.heads} heads, feed-forward {own.feed_forward}, {own.positions} positions"
        + (f", relative buckets {buckets}" if buckets != "none" else ""),
        "parameters": f"{written.parameters:,} in this folder"
        + (
            f", {decoder_file.count(encoder):,} of them of the decoder and the head"
            if has_decoder
            else ""
        ),
        "longest input": f"{encoder.length} tokens",
    }
    if encoder.experiment is None:
        rows["converted from"] = f"`{encoder.hub_name or _last_part(encoder.path)}`"
    elif encoder.results:
        rows |= _describe_fine_tuning(encoder, written.architecture)
    else:
        rows |= _describe_pretraining(encoder)
    head = next((head for head in OUTPUTS if written.architecture.endswith(head)), "")
    if encoder.model.causal:  # BERT's class has another name
        head = "CausalLM"
    outputs = OUTPUTS.get(head, ("last_hidden_state",))
    notes = NO_POOLER if not head and "pooler/kernel" not in encoder.params else ""
    if not has_tokenizer_json:
        notes += NO_TOKENIZER.substitute(name=name, bos=vocabulary.bos, eos=vocabulary.eos)
    mask = vocabulary.pieces[vocabulary.mask]
    loading = LOADING[format].substitute(
        name=name,
        auto=f"AutoModelFor{head}" if head else "AutoModel",
        output="` and `".join(f"output.{name}" for name in outputs),
        names=", ".join(f'"{name}"' for name in outputs),
        notes=notes,
        mask=mask,
        bos=vocabulary.pieces[vocabulary.bos],
    )
    task = "fill-mask" if has_decoder else PIPELINES.get(head, "feature-extraction")
    front, use = "", ""
    if format == "huggingface":
        front = _front_matter(name, encoder, task, metadata or {})
        decoder = DECODER.substitute(file=decoder_file.FILE, mask=mask) if has_decoder else ""
        several = encoder.results is not None and encoder.results.label_separator is not None
        if task in USE and has_tokenizer_json:
            use = USE[task].substitute(
                name=name,
                trust=", trust_remote_code=True" if has_decoder else "",
                mask=mask,
                decoder=decoder,
                causal=_describe_next_tokens(name, encoder),
                all=", top_k=None" if several else "",
            )
    return front + CARD.substitute(
        name=name,
        made="trained" if encoder.experiment else "converted",
        table="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        classes=_describe_classes(encoder.results),
        loading=loading,
        use=use,
        verification=_describe_verification(verification),
    )


def _describe_next_tokens(name: str, encoder: OpenedModel) -> str:
    """Returns how an encoder that has learned next tokens too predicts them; "" for others."""
    if not encoder.objective.causal_share:
        return ""
    text = CAUSAL if find_causal_class(encoder) else NO_CAUSAL
    return text.substitute(name=name)


def _last_part(path: str) -> str:
    """Returns a path, or a source of text, without the folders of this machine."""
    if path.startswith(("tfds:", "seqio:")):
        return path
    kind = next((kind for kind in ("files:", config.RANDOM) if path.startswith(kind)), "")
    return kind + pathlib.PurePath(path.removeprefix(kind)).name


def _front_matter(
    name: str, encoder: OpenedModel, task: str, metadata: dict[str, typing.Any]
) -> str:
    """Returns the YAML at the top of the card, which the Hub reads. Each value is JSON."""
    results, experiment = encoder.results, encoder.experiment
    entries: dict[str, typing.Any] = {"library_name": "transformers", "pipeline_tag": task}
    dataset = {"name": "held-out text of the run", "type": "text"}
    measured = []
    if results:
        trained_on = results.task or ""
        hub_name = GLUE if trained_on in GLUE_TASKS else DATASETS.get(trained_on)
        if hub_name:
            entries |= {"language": "en", "datasets": [hub_name]}
        dataset = {"name": trained_on, "type": hub_name or trained_on}
        measured = [
            {"type": metric, "value": round(value, 4)} for metric, value in results.scores.items()
        ]
    elif experiment is not None:
        if list(experiment.corpus.rates) == ["installed_docs"]:
            entries["language"] = "en"
        if experiment.decoder:
            entries["tags"] = ["mae-lm"]
        for line in _evaluations(encoder)[-1:]:
            measured = [
                {"type": "loss", "name": experiment.objective.unit, "value": line["eval_loss"]},
                {"type": "accuracy", "value": line["eval_accuracy"]},
            ]
    if measured:
        result = {"task": {"type": task}, "dataset": dataset, "metrics": measured}
        entries["model-index"] = [{"name": name, "results": [result]}]
    lines = [f"{key}: {_as_yaml(value)}\n" for key, value in (entries | metadata).items()]
    return f"---\n{''.join(lines)}---\n\n"


def _as_yaml(value: typing.Any) -> str:
    """Returns a value as YAML: a word as it is, anything else as JSON."""
    is_word = isinstance(value, str) and value.replace("-", "").replace("_", "").isalpha()
    return value if is_word else json.dumps(value, ensure_ascii=False)


def _evaluations(encoder: OpenedModel) -> list[dict[str, typing.Any]]:
    """Returns the recorded evaluations of a run up to the step of the encoder."""
    lines = metrics.read(encoder.workdir)
    return [line for line in lines if line["step"] <= encoder.step and "eval_loss" in line]


def _describe_pretraining(encoder: OpenedModel) -> dict[str, str]:
    """Returns the table entries of a pretraining run: {name: text}."""
    experiment = encoder.experiment
    run, corpus = experiment.run, experiment.corpus
    heldout_rate = experiment.evaluated.objective.masking.rate
    started = run.continue_from or run.init_from
    lines = [line for line in metrics.read(encoder.workdir) if line["step"] <= encoder.step]
    trained = [line for line in lines if "loss" in line][-1:]
    losses = [f"{line['loss']:.4f} (batch of step {line['step']})" for line in trained]
    rate = "" if experiment.model.causal else f"at mask rate {heldout_rate:g}, "
    losses += [
        f"on the rows that the run held out, {rate}"
        f"{line['eval_loss']:.4f} with accuracy {line['eval_accuracy']:.3f} (step {line['step']})"
        for line in _evaluations(encoder)[-1:]
    ]
    shares = {
        name: "all rows" if corpus.reads_all else f"{rate:.0%}"
        for name, rate in corpus.rates.items()
    }
    described = {
        "objective": _describe_objective(experiment),
        "corpus": "; ".join(f"`{_last_part(name)}` {share}" for name, share in shares.items()),
        "started from": f"`{_last_part(started)}`" if started else "random weights",
        "steps": f"{encoder.step:,} of {run.train_steps:,}, each of {run.batch_size} rows of "
        f"{corpus.sequence_length} tokens",
        f"loss, {experiment.objective.unit}": "; ".join(losses) or "not recorded",
    }
    if encoder.left_out:
        described["left out"] = f"the head of the objective: {', '.join(encoder.left_out)}"
    return described


def _describe_objective(experiment: config.Experiment) -> str:
    """Returns what was masked, what the encoder read of it, and what predicts it."""
    objective, masking = experiment.objective, experiment.objective.masking
    if objective.name == "causal":
        return f"{objective.title}: each token is predicted from those before it"
    reads = objective.kind.reads.format(share=f"{objective.encoder_mask_fraction:.0%}")
    if masking.random_fraction:
        reads += f". {masking.random_fraction:.0%} become random tokens"
    if masking.keep_fraction:
        reads += f". {masking.keep_fraction:.0%} stay as they are"
    decoder = ""
    if experiment.decoder:
        layers = experiment.decoder.layers
        decoder = f". A decoder of {layers} layer{'s' * (layers > 1)} puts [MASK] back"
    unit = "" if masking.unit == "token" else f" in whole {masking.unit}s"
    if masking.strategy:
        unit += f" as `{masking.strategy}` says"
    return f"{objective.title}: {masking.rate:.0%} of the tokens are masked{unit}. {reads}{decoder}"


def _describe_fine_tuning(encoder: OpenedModel, architecture: str) -> dict[str, str]:
    """Returns the table entries of a fine-tuned run: {name: text}."""
    results = encoder.results
    rows = {
        "fine-tuned on": results.task or "not recorded",
        "started from": f"`{_last_part(results.init_from or 'not recorded')}`",
        "steps": f"{encoder.step:,}",
    }
    if results.score is not None:
        evaluated_on = ", ".join(results.evaluated_on.values())
        scores = ", ".join(f"{metric} {value:.4f}" for metric, value in results.scores.items())
        rows["score"] = f"{scores} on {evaluated_on}"
    if results.labels:
        rows["labels"] = ", ".join(f"`{label}`" for label in results.labels)
    if architecture.endswith("QuestionAnswering"):
        rows["logits"] = SPANS
        threshold = results.best.get("best_f1_threshold")
        if threshold is not None:  # SQuAD 2.0
            rows["no answer"] = (
                "if the score of the first token minus that of the best span is above "
                f"{threshold:.7g}. A score is the start logit plus the end logit"
            )
    elif architecture.endswith("TokenClassification"):
        rows["logits"] = WORDS
    elif results.label_separator is not None:
        rows["logits"] = "one for each label. A text has the labels whose logit is above 0"
    elif not results.labels:
        rows["output"] = "the score as it was trained, from 0 to 1 (STS-B: score / 5)"
        if results.task == "own":
            low, high = encoder.experiment.finetune.custom.score_range
            rows["output"] += f"; a score of the files is {low:.7g} + output * {high - low:.7g}"
    return rows


def _describe_classes(results: Results | None) -> str:
    """Returns the section about the classes of a fine-tuned run; "" without classes."""
    if results is None or results.classes is None:
        return ""
    evaluated_on = next(iter(results.evaluated_on.values()), "the dev set")
    text = results.classes.tables(tables.markdown)
    if results.classes.shows_confusion:
        text += f"\n\n![Confusion matrix]({CONFUSION})"
    return CLASSES.substitute(evaluated_on=evaluated_on, tables=text)


def _describe_verification(verification: list[verify.Report] | str) -> str:
    if isinstance(verification, str):
        return f"Not verified when this was written: {verification}."
    compared = "; ".join(
        f"{subject} {difference:.2g} (largest value {largest:.3g})"
        for subject, difference, largest in verification
    )
    return (
        "The folder was read back and compared with JAX on real text, in float32; the tokenizer's "
        f"ids, if it has one, were the same. Largest differences: {compared}."
    )
