"""Fine-tuning reads pairs and computes heads as the family of the encoder does."""

import json

import jax
import numpy as np
import pytest
from testing import STOCK_ENCODERS, flatten, in_memory, stock_folder

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")

from maelm_jax import config  # noqa: E402
from maelm_jax.encoders import export, families, opened, weight_files  # noqa: E402
from maelm_jax.encoders import family as family_heads  # noqa: E402
from maelm_jax.encoders.results import Results  # noqa: E402
from maelm_jax.finetuning import batches, glue, grid, heads, initial_encoder  # noqa: E402
from maelm_jax.finetuning.task import InputFormat  # noqa: E402
from maelm_jax.model import maelm  # noqa: E402

PAIRS = [("the cat sat on the mat", "a dog"), ("a", "the cat sat " * 3)]
LABELS = Results(labels=["a", "b", "c"])
SENTENCE, SPAN = (grid.create_task(name, config.Finetune()) for name in ("mnli", "squad1"))
TOKEN = grid.create_task("conll", config.Finetune(tasks="conll", train_file="a", dev_file="b"), LABELS)
SENTENCE_CASES = ((name, SENTENCE) for name in STOCK_ENCODERS if name != "modernbert")  # modernbert-local has the same head
CASES = [*SENTENCE_CASES, ("bert", SPAN), ("modernbert", SPAN), ("bert", TOKEN), ("modernbert", TOKEN)]


@pytest.mark.parametrize("stock_name,head", CASES, ids=lambda value: getattr(value, "name", value))
def test_a_fine_tuned_pair_scores_as_in_the_stock_task_model(tmp_path, vocabulary, stock_name, head):
    stock_folder(tmp_path / "stock", stock_name, "AutoModel", vocabulary)
    model_type = stock_name.removesuffix("-local")
    family = families.FAMILIES[model_type]
    start = initial_encoder.load(str(tmp_path / "stock"))
    model = opened.find_model(tmp_path / "stock").model

    graph, init = heads.define(model, vocabulary.size, vocabulary.pad, head)
    fresh = jax.jit(init)(jax.random.key(1))
    params = start.load_into(fresh)
    if family.pooler and head == SENTENCE:
        pooler = weight_files.read_folder(tmp_path / "stock")["pooler.dense.weight"]
        assert np.array_equal(params["classifier"]["dense"]["kernel"].T, pooler)
    rows = SENTENCE.encode([glue.Example(pair, 0, 0) for pair in PAIRS], InputFormat(vocabulary, 48, family.pair), "pairs").features
    batch = batches.pack(rows, 48, 2, vocabulary.pad, 0)
    ours = np.asarray(jax.jit(lambda p: maelm.apply(graph, p)(batches.Batch(*map(jax.numpy.asarray, batch))))(params))

    flat = {path: np.asarray(value) for path, value in flatten(params).items()}
    flat["encoder/token_embedding"] = flat["encoder/token_embedding"][: vocabulary.size]
    stock_head = family_heads.find_head(flat, LABELS)
    (tmp_path / "out").mkdir()
    export.write("huggingface", tmp_path / "out", in_memory(flat, model, vocabulary, 48, head=stock_head))
    [name] = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]
    task_model, info = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer, (first, second) = transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), zip(*PAIRS, strict=True)
    inputs = tokenizer(list(first), list(second), padding=True, return_tensors="pt")
    with torch.no_grad():
        outputs = task_model.eval()(**inputs)
    if head == SENTENCE:
        assert np.abs(outputs.logits.numpy() - ours).max() < 1e-5 * max(1, np.abs(ours).max())
    elif head == TOKEN:
        theirs, real = outputs.logits.numpy(), inputs["attention_mask"].numpy() > 0
        assert np.abs(theirs - ours[:, : theirs.shape[1]])[real].max() < 1e-5 * max(1, np.abs(ours).max())
    else:
        theirs = np.stack([outputs.start_logits.numpy(), outputs.end_logits.numpy()], 2)
        for row, second, length, ours_row in zip(theirs, rows.context, rows.lengths, ours, strict=True):
            context = slice(second, length - 1)
            assert np.abs(row[context] - ours_row[context]).max() < 1e-5 * max(1, np.abs(row).max())
