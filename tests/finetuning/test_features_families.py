"""Fine-tuning reads pairs and computes heads as the family of the encoder does."""

import json

import jax
import numpy as np
import pytest
from testing import flatten

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")

from maelm_jax import config  # noqa: E402
from maelm_jax.data import vocabulary as vocabularies  # noqa: E402
from maelm_jax.encoders import families, fine_tuned_head, huggingface, source  # noqa: E402
from maelm_jax.encoders import tokenizer as tokenizers  # noqa: E402
from maelm_jax.finetuning import batches, features, heads, initial_encoder  # noqa: E402
from maelm_jax.finetuning.task_data import SPAN, Head  # noqa: E402
from maelm_jax.model import maelm  # noqa: E402

SIZES = {
    "vocab_size": 500, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 50, "initializer_range": 0.2, "pad_token_id": 1,
}  # fmt: skip
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "distilbert": lambda: transformers.DistilBertConfig(**SIZES | {"hidden_dim": 48}),
    "electra": lambda: transformers.ElectraConfig(**SIZES, embedding_size=32),
    "modernbert": lambda: transformers.ModernBertConfig(**SIZES, layer_types=["full_attention"] * 2, eos_token_id=2, bos_token_id=0),
    "mpnet": lambda: transformers.MPNetConfig(**SIZES),
    "roberta": lambda: transformers.RobertaConfig(**SIZES, type_vocab_size=1),
}
PAIRS = [("the cat sat on the mat", "a dog"), ("a", "the cat sat " * 3)]


SENTENCE, TOKEN = Head("sentence", 3), Head("token", 3)
CASES = [*((name, SENTENCE) for name in sorted(CONFIGS)), ("bert", SPAN), ("modernbert", SPAN), ("bert", TOKEN), ("modernbert", TOKEN)]


@pytest.mark.parametrize("model_type,head", CASES)
def test_a_fine_tuned_pair_scores_as_in_the_stock_task_model(tmp_path, vocabulary, model_type, head):
    torch.manual_seed(0)
    family = families.FAMILIES[model_type]
    stock = transformers.AutoModel.from_config(CONFIGS[model_type]())
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    stock.save_pretrained(tmp_path / "stock")
    tokenizers.write(tmp_path / "stock", vocabulary, 48, family.pair)
    start = initial_encoder.load(str(tmp_path / "stock"))
    model = source.find(str(tmp_path / "stock")).model(config.Model())

    graph, init = heads.create(model, vocabulary.size, vocabulary.pad, head)
    params = jax.jit(init)(jax.random.key(1))
    params["encoder"] = start.encoder(params["encoder"])
    if head == SENTENCE:
        params["classifier"]["dense"] = start.pooler(params["classifier"]["dense"])
    if model_type == "bert" and head == SENTENCE:
        assert np.array_equal(params["classifier"]["dense"]["kernel"].T, stock.pooler.dense.weight.detach().numpy())
    encoded = features.sentences(PAIRS, vocabulary, 48, family.pair)
    rows = features.Features(encoded.ids, np.zeros(len(PAIRS), np.int32), encoded.second)
    batch = batches.pack(rows, 48, 2, vocabulary.pad, 0)
    ours = np.asarray(jax.jit(lambda p: maelm.apply(graph, p)(batches.Batch(*map(jax.numpy.asarray, batch))))(params))

    flat = {path: np.asarray(value) for path, value in flatten(params).items()}
    flat["encoder/token_embedding"] = flat["encoder/token_embedding"][: vocabulary.size]
    stock_head = fine_tuned_head.FineTunedHead.of(flat, ["a", "b", "c"])
    (tmp_path / "out").mkdir()
    tokenizers.write(tmp_path / "out", vocabulary, 48, family.pair)
    huggingface.write(tmp_path / "out", flat, model, vocabulary.size, vocabulary.special, stock_head)
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
        for row, second, length, ours_row in zip(theirs, encoded.second, rows.lengths, ours, strict=True):
            context = slice(second, length - 1)
            assert np.abs(row[context] - ours_row[context]).max() < 1e-5 * max(1, np.abs(row).max())


@pytest.fixture(scope="module")
def vocabulary() -> vocabularies.Vocabulary:
    from pydoc_data import topics

    from maelm_jax.data import vocabulary_training

    return vocabulary_training.train([topics.topics[name] for name in sorted(topics.topics)], config.Vocabulary(size=500))
