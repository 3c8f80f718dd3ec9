"""`load_encoder(...)`: `encode` and the command `embed`, packed batches, and `fill_mask`."""

import itertools
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import encoder_states, padded_ids, unflatten

import maelm_jax
from maelm_jax import config, embed, export
from maelm_jax.encoders import inference
from maelm_jax.model import maelm, model_inputs
from maelm_jax.model.kernels import backends

LINES = ["a short line", "", "The encoder reads the visible tokens only; the part that is kept after pretraining. " * 9, "a short line", "é 🙂", "x"]
TEXTS = ["The value of the <mask> is used.", "[MASK] is a <mask> of an object, and an object has a value.", "the<mask>"]


# Batches.


def draw_texts(count: int, longest: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(2, 600, draw.integers(2, longest + 1)).tolist() for _ in range(count)]


@pytest.mark.parametrize("longest", [2, 30, 120, 500, 3000])
def test_every_text_is_in_a_batch_once(longest):
    texts = draw_texts(200, longest)
    found = {}
    for batch in inference.pack_texts(texts, 1):
        assert batch.ids.size == max(inference.batch_slots(), batch.ids.shape[1]) or len(batch.ids) == 1
        for index, number in enumerate(batch.texts):
            assert number not in found
            found[number] = batch.select(batch.ids, index).tolist()
            assert batch.select(batch.positions, index).tolist() == list(range(len(texts[number])))
            assert len({tuple(where) for where in zip(*np.nonzero((batch.owners == index) & (batch.segments > 0)), strict=True)}) == len(
                texts[number]
            )
        for row in range(len(batch.ids)):
            runs = [(segment, owner) for segment, owner in zip(batch.segments[row], batch.owners[row], strict=True) if segment]
            assert len(set(runs)) == len({segment for segment, _ in runs}), "a segment holds one text"
    assert [found[number] for number in range(200)] == texts


@pytest.mark.parametrize(("longest", "most"), [(30, 0.15), (60, 0.15), (200, 0.15), (500, 0.2)])
def test_little_of_the_batches_is_padding(longest, most):
    texts = draw_texts(1000, longest)
    slots = sum(batch.ids.size for batch in inference.pack_texts(texts, 1))
    assert 1 - sum(map(len, texts)) / slots < most


def test_a_server_compiles_eight_shapes_at_most():
    shapes = set()
    for count, longest in itertools.product((1, 2, 5, 20, 100), (2, 10, 33, 100, 300, 512, 1500, 8000)):
        shapes |= {batch.ids.shape for batch in inference.pack_texts(draw_texts(count, longest), 1)}
    assert len(shapes) <= 8


# Vectors.


@pytest.mark.parametrize("kind", ["mpnet", "roberta", "modernbert"])
def test_embeddings_are_the_encoders_states(workdirs, vocabulary, kind):
    """Of texts that share rows."""
    loaded, ids = maelm_jax.load_encoder(workdirs[kind]), padded_ids(LINES, vocabulary, 48)
    padded = encoder_states(loaded.tree(), loaded.model, vocabulary, ids)
    states = [state[row != vocabulary.pad] for row, state in zip(ids, padded, strict=True)]
    packed = loaded.hidden_states(loaded.add_ends(vocabulary.encode_batch(LINES)))
    assert max(np.abs(one - other).max() for one, other in zip(states, packed, strict=True)) < 1e-5
    assert np.abs(loaded.encode(LINES) - [state.mean(0) for state in states]).max() < 1e-5
    assert np.abs(loaded.encode(LINES, pooling="first") - [state[0] for state in states]).max() < 1e-5


def test_the_command_writes_what_python_gives(workdirs, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    argv = [f"--workdir={workdirs['mpnet']}", f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / 'vectors.npy'}", "--pooling=first"]
    assert embed.main(argv) == 0 and "1 lines cut to 48 tokens" in capsys.readouterr().out
    vectors, loaded = np.load(tmp_path / "vectors.npy"), maelm_jax.load_encoder(workdirs["mpnet"])
    assert vectors.dtype == np.float32 and np.array_equal(vectors, loaded.encode(LINES, "first"))
    assert embed.main([*argv, "--normalize"]) == 0
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.allclose(np.load(tmp_path / "vectors.npy"), unit, atol=1e-6)
    assert np.allclose(loaded.encode(LINES, "first", normalize=True), unit, atol=1e-6)


def test_embeddings_are_cut_at_what_was_trained_or_where_the_command_says(workdirs, tmp_path, capsys):
    folder, output = tmp_path / "tuned", tmp_path / "sequence_length=v.npy"  # a name, which sets no length
    shutil.copytree(workdirs["mpnet"], folder)
    (folder / "results.json").write_text('{"max_length": 20}')
    (tmp_path / "lines.txt").write_bytes(("\ufeff" + "\n".join([LINES[2], "one", LINES[2]])).encode())
    argv = [f"--workdir={folder}", f"--input={tmp_path / 'lines.txt'}", f"--output={output}"]
    assert embed.main(argv) == 0 and "2 lines cut to 20 tokens" in capsys.readouterr().out
    vectors = np.load(output)
    assert np.allclose(vectors[0], vectors[2], atol=1e-6), "the byte-order mark is no text"
    assert np.allclose(vectors, maelm_jax.load_encoder(folder).encode([LINES[2], "one", LINES[2]]), atol=1e-6)
    assert embed.main([*argv, "--max_length=160"]) == 0 and "cut to 160 tokens" in capsys.readouterr().out
    with pytest.raises(config.ConfigError, match="--max_length=161"):
        embed.main([*argv, "--max_length=161"])
    assert embed.main([*argv, "--dtype=bfloat16"]) == 0
    assert 1e-5 < np.abs(np.load(output) - vectors).max() < 0.1


@pytest.mark.parametrize(
    ("content", "output", "message"),
    [
        (b"x\n", "in.txt/v.npy", "in.txt"),
        (b"", "v.npy", "in.txt"),
        (b"ok\n\xff\xfe", "v.npy", "in.txt"),
        (b"x\n", "v.txt", r"v\.txt"),
        (b"x\n", "f.npy", "f.npy"),
    ],
)
def test_embed_refuses_before_the_work(workdirs, tmp_path, monkeypatch, content, output, message):
    monkeypatch.setattr(maelm_jax.encoders.opened, "find_model", None)
    (tmp_path / "in.txt").write_bytes(content)
    (tmp_path / "f.npy").mkdir()
    with pytest.raises(config.ConfigError, match=message):
        embed.main([f"--workdir={workdirs['mpnet']}", f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / output}"])


@pytest.mark.parametrize("command", [export, embed])
def test_an_output_in_a_bucket_is_refused_and_a_home_is_found(workdirs, tmp_path, monkeypatch, command):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lines.txt").write_text("A line.\n")
    more = ["--no-verify"] if command is export else ["--input=~/lines.txt"]
    with pytest.raises(config.ConfigError, match="gs://b/out.npy"):
        command.main([f"--workdir={workdirs['roberta']}", "--output=gs://b/out.npy", *more])
    assert command.main([f"--workdir={workdirs['roberta']}", "--output=~/new/out.npy", *more]) == 0
    assert (tmp_path / "new" / "out.npy").exists()


def test_texts_are_any_iterable_of_strings(workdirs):
    loaded, texts = maelm_jax.load_encoder(workdirs["roberta"]), ["one text", "another"]
    expected = loaded.encode(texts)
    for given in (tuple(texts), np.array(texts), (text for text in texts)):
        assert np.array_equal(loaded.encode(given), expected)
    assert loaded.encode([]).shape == (0, 32)
    assert np.array_equal(loaded.encode(["a cut \ud83d"]), loaded.encode(["a cut ?"])), "as in a table"
    assert loaded.fill_mask(["a cut \ud83d <mask>"]) == loaded.fill_mask(["a cut ? <mask>"])
    for given in ("one text", [("a", "b")], ["a", None], [b"a"]):
        with pytest.raises(config.ConfigError, match="texts"):
            loaded.encode(given)
    with pytest.raises(config.ConfigError, match="max"):
        loaded.encode(texts, pooling="max")
    assert repr(loaded).startswith("Encoder(2 layers of width 32, ")


# Masks.


@pytest.mark.parametrize("kind", ["mpnet", "mpnet-mlm", "modernbert"])
def test_masked_tokens_are_predicted_from_the_other_tokens(workdirs, vocabulary, kind):
    """Each text in a row of its own gives the probabilities that a batch of all gives, also the last of several batches."""
    encoder = maelm_jax.load_encoder(workdirs[kind])
    many = encoder.fill_mask(TEXTS * 40, top=3)
    assert [len(masks) for masks in many] == [1, 2, 1] * 40
    graph, _ = maelm.create(encoder.model, vocabulary.size, vocabulary.special)
    rows = [[vocabulary.bos, *vocabulary.encode_masked(text), vocabulary.eos] for text in TEXTS]
    ids = np.array([row + [vocabulary.pad] * (max(map(len, rows)) - len(row)) for row in rows], np.int32)
    masked = ids == vocabulary.mask
    visible = masked if encoder.reads_masks else np.zeros_like(masked)
    positions, segments = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape), (ids != vocabulary.pad).astype(np.int32)
    sizes = model_inputs.Budget(ids.shape[1], 2)
    inputs = model_inputs.split(*map(jnp.asarray, (ids, segments, positions, masked, visible)), sizes, vocabulary.mask)
    computed = np.asarray(jax.jit(lambda params, inputs: maelm.apply(graph, params)(inputs))(unflatten(encoder.params), inputs))
    for masks, scores_of_text in zip(many[-3:], computed, strict=True):
        logits = scores_of_text[: len(masks), : vocabulary.size]
        for of_mask, scores in zip(masks, logits, strict=True):
            probabilities = np.exp(scores) / np.exp(scores).sum()
            order = np.argsort(-probabilities)[:3]
            np.testing.assert_allclose([one.probability for one in of_mask], probabilities[order], rtol=1e-4)
            assert [one.token for one in of_mask] == [vocabulary.decode([index]) or vocabulary.pieces[index] for index in order]


def test_a_path_names_a_step_too(workdirs, tmp_path):
    by_name = maelm_jax.load_encoder(f"{workdirs['mpnet']}@6")
    assert by_name.step == 6 and np.array_equal(by_name.encode(LINES), maelm_jax.load_encoder(workdirs["mpnet"], step=6).encode(LINES))
    with pytest.raises(config.ConfigError, match="step=12"):
        maelm_jax.load_encoder(f"{workdirs['mpnet']}@6", step=12)
    folder = shutil.copytree(workdirs["mpnet"], tmp_path / "mine@7")
    assert maelm_jax.load_encoder(folder).step == 12, "a folder may have such a name"
    assert maelm_jax.load_encoder(f"{folder}@6").step == 6
    with pytest.raises(config.ConfigError, match="7"):
        maelm_jax.load_encoder(f"{workdirs['mpnet']}@7")


def test_an_encoder_is_pickled_after_use_and_is_equal_to_itself_only(workdirs, monkeypatch):
    encoder, other = (maelm_jax.load_encoder(workdirs["mpnet"]) for _ in range(2))
    texts = ["The [MASK] is a number.", "A [MASK].", "[MASK] class."]
    vectors, predicted = encoder.encode(texts), encoder.fill_mask(texts)
    assert np.array_equal(pickle.loads(pickle.dumps(encoder)).encode(texts), vectors)
    assert encoder != other and encoder in {encoder: 1}
    monkeypatch.setattr("maelm_jax.encoders.opened.TEXTS_AT_ONCE", 2)
    for one, part in zip(predicted, encoder.fill_mask(texts), strict=True):
        for candidates, again in zip(one, part, strict=True):
            assert [found.token for found in candidates] == [found.token for found in again]


@pytest.mark.parametrize(
    ("texts", "top", "message"),
    [
        (["no mask"], 5, r"texts\[0\]"),
        (["<mask>", "<mask> " + "a " * 200], 5, r"texts\[1\]"),
        ("<mask>", 5, "texts"),
        (["<mask>"], 0, "top"),
        (["<mask>"], 601, "top"),
    ],
)
def test_wrong_input_is_refused(workdirs, texts, top, message):
    with pytest.raises(config.ConfigError, match=message):
        maelm_jax.load_encoder(workdirs["mpnet"]).fill_mask(texts, top)


def test_a_folder_without_head_says_what_to_load(copy_export, tmp_path):
    folder = copy_export("mpnet", tmp_path / "out")
    (folder / "decoder.safetensors").unlink()
    with pytest.raises(config.ConfigError):
        maelm_jax.load_encoder(folder).fill_mask(["<mask>"])


def test_masks_are_read_by_an_encoder_that_read_them_in_pretraining(make_workdir, tmp_path):
    """A decoder does not tell: the encoder of delta 1 reads all masks. The export keeps that."""
    read = {"Objective.name": "between", "Objective.mask_fraction": 1.0}
    settings = {
        "hidden": {},
        "read": read,
        "kept": read | {"Decoder.refills_mask": False},
        "renumbered": {"Masking.renumber": True},
        "random": read | {"Masking.random_fraction": 1.0},
        "mlm": {"Objective.name": "mlm", "Masking.random_fraction": 1.0},
    }
    loaded = {name: maelm_jax.load_encoder(make_workdir(tmp_path / name, changes)) for name, changes in settings.items()}
    assert {name for name in settings if loaded[name].reads_masks} == {"read", "kept", "mlm"}, "in MLM nothing else predicts"
    first = [loaded[name].fill_mask(TEXTS[:1], top=1)[0][0][0].probability for name in ("hidden", "read", "kept", "renumbered")]
    assert len(set(first)) == 4, "the decoder reads the states of the masks, the encoder's positions skip the masks"
    for name in ("kept", "renumbered"):
        loaded[name].save_pretrained(tmp_path / "out" / name)
        again = maelm_jax.load_encoder(tmp_path / "out" / name)
        assert again.objective.visible_mask_fraction == loaded[name].objective.visible_mask_fraction
        assert again.objective.masking.renumber == loaded[name].objective.masking.renumber
        assert again.model.decoder.refills_mask == loaded[name].model.decoder.refills_mask


def test_a_run_of_another_kind_of_device_is_loaded(make_workdir, tmp_path):
    """Its attention backend computes nothing here."""
    workdir = make_workdir(tmp_path / "run", {"Compute.attention_backend": "'cudnn'"})
    assert maelm_jax.load_encoder(workdir).encode(["A text."]).shape == (1, 32)


def test_an_encoder_that_one_of_several_devices_computes_has_fused_attention(workdirs, monkeypatch):
    """The eight devices of this machine do not make XLA shard its arrays."""
    targets = []
    original = backends.choose_backend
    monkeypatch.setattr(backends, "choose_backend", lambda *call: targets.append(call[2]) or original(*call))
    maelm_jax.load_encoder(workdirs["mpnet"]).encode(["A text."])
    assert targets and {target.devices for target in targets} == {1}
