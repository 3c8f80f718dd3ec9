"""A run as maelm_jax.train leaves it (one layer, random weights, made in a second), and little data sets in the published layouts."""

import json
import pathlib
import random

import pytest
from testing import call, english, once

from maelm_jax import config, gin_files
from maelm_jax.data import vocabulary_training
from maelm_jax.training.workdir import Workdir

WORDS = "the a cat dog bird house river green old quick sleeps runs sees likes under near with and of big small stone rain light night seven".split()


def sentence(draw: random.Random, words: int = 6) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words)).capitalize() + "."


@pytest.fixture(scope="session")
def vocabulary():
    draw = random.Random(0)
    return vocabulary_training.train([*english(), *(sentence(draw, 40) for _ in range(400))], config.Vocabulary(size=500))


@pytest.fixture(scope="session")
def pretrained(vocabulary, tmp_path_factory) -> pathlib.Path:
    """A workdir that can be started from."""
    import jax
    import jax.numpy as jnp

    from maelm_jax.model import maelm
    from maelm_jax.training import checkpoint, step

    settings = [
        "Encoder.layers=1",
        "Encoder.width=32",
        "Encoder.heads=2",
        "Encoder.feed_forward=64",
        "SEQUENCE_LENGTH=64",
        "Encoder.max_positions=64",
    ]
    experiment = gin_files.load(["tiny.gin"], [*settings, "Vocabulary.size=500", "Mesh.fsdp=7"])  # a mesh of elsewhere

    def make(folder: pathlib.Path):
        vocabulary.save(folder / "little" / "vocabulary")
        (folder / "little" / "config.gin").write_text(gin_files.render(experiment))
        _, init = maelm.create(experiment.model, vocabulary.size, vocabulary.special)
        params = jax.jit(init)(jax.random.key(5))
        checkpoints = checkpoint.Checkpoints(Workdir(folder / "little"))
        checkpoints.save(3, step.State(jnp.zeros((), jnp.int32), params, ()))
        checkpoints.close()

    return once(tmp_path_factory, "pretrained", make) / "little"


def write_tsv(path: pathlib.Path, header: list[str] | None, rows: list[list[str]]):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in ([header] if header else []) + rows))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> pathlib.Path:
    """RTE, MNLI, CoLA, STS-B and both SQuADs: 32 training examples that are the dev set as well."""
    root = tmp_path_factory.mktemp("data")
    draw = random.Random(1)
    rte = [[str(i), sentence(draw), sentence(draw), draw.choice(["entailment", "not_entailment"])] for i in range(32)]
    cola = [["src", str(draw.randrange(2)), "", sentence(draw)] for _ in range(32)]
    scores = [f"{i * 5 / 31:.4f}" for i in range(32)]
    draw.shuffle(scores)
    stsb = [[str(i), "news", "f", "2012", "0", "s", "s", sentence(draw), sentence(draw), scores[i]] for i in range(32)]
    stsb_header = "index genre filename year old_index source1 source2 sentence1 sentence2 score".split()
    for part in ("train", "dev"):
        write_tsv(root / "glue" / "RTE" / f"{part}.tsv", ["index", "sentence1", "sentence2", "label"], rte)
        write_tsv(root / "glue" / "CoLA" / f"{part}.tsv", None, cola)
        write_tsv(root / "glue" / "STS-B" / f"{part}.tsv", stsb_header, stsb)
    mnli = [[sentence(draw), sentence(draw), draw.choice(["entailment", "neutral", "contradiction"])] for _ in range(32)]
    for part in ("train", "dev_matched", "dev_mismatched"):
        write_tsv(root / "glue" / "MNLI" / f"{part}.tsv", ["sentence1", "sentence2", "gold_label"], mnli)
    for name, unanswerable in (("v1.1", 0), ("v2.0", 3)):
        content = json.dumps(squad_json(random.Random(2), 32, unanswerable))
        for part in ("train", "dev"):
            (root / "squad").mkdir(exist_ok=True)
            (root / "squad" / f"{part}-{name}.json").write_text(content)
    return root


def squad_json(draw: random.Random, count: int, every: int) -> dict:
    """`count` questions on contexts of 14 words in 4 articles; with `every`, each such question is unanswerable."""
    articles = [{"title": f"Article {a}", "paragraphs": []} for a in range(4)]
    for number in range(count):
        words = sentence(draw, 14).split()
        first = draw.randrange(10)
        text = " ".join(words[first : first + draw.randrange(1, 4)]).strip(".")
        start = len(" ".join(words[:first])) + (first > 0)
        impossible = bool(every) and number % every == 0
        answers = [] if impossible else [{"text": text, "answer_start": start}]
        asked = {"id": f"q{number}", "question": sentence(draw, 4), "answers": answers, "is_impossible": impossible}
        articles[number % 4]["paragraphs"].append({"context": " ".join(words), "qas": [asked]})
    return {"version": "v2.0" if every else "1.1", "data": articles}


@pytest.fixture(scope="session")
def corpus_vocabulary(documents):
    """A vocabulary of real English."""
    return vocabulary_training.train(documents, config.Vocabulary(size=4000, sample_megabytes=0.6))


@pytest.fixture(scope="session")
def arguments(data_dir):
    """Makes the arguments of a small run: `arguments(init_from, workdir, *more)`."""
    settings = [f"DATA_DIR={data_dir}", "EPOCHS=2", "BATCH_SIZE=16", "MAX_LENGTH=64", "Run.log_every=1", "Run.checkpoint_every=3"]

    def make(init_from, workdir, *more: str) -> list[str]:
        return [f"--init_from={init_from}", f"--workdir={workdir}", *(f"--gin.{setting}" for setting in settings), *more]

    return make


@pytest.fixture(scope="session")
def rte_run(arguments, pretrained, tmp_path_factory) -> pathlib.Path:
    """A finished run on RTE, on one device. What the command printed is in the file `printed`."""

    def make(folder: pathlib.Path):
        done = call("finetune", "--gin_file=finetune/rte.gin", *arguments(pretrained, folder / "run"))
        assert done.status == 0, done.stderr
        (folder / "run" / "printed").write_text(done.stdout)

    return once(tmp_path_factory, "rte", make) / "run"


@pytest.fixture
def tfds_folder(tmp_path):
    """Writes a dataset in TFDS format to a folder in which TFDS looks for it."""
    tfds = pytest.importorskip("tensorflow_datasets")
    import tensorflow as tf
    from tensorflow_datasets.core.utils import file_utils

    def make(place: str, features, records):
        """`place` is NAME/CONFIG/VERSION; records(split) are those of a split."""
        folder = tmp_path / place
        folder.mkdir(parents=True)
        name = place.split("/")[0] if "squad" in place else place.split("/")[1]
        infos = []
        for split in ("train", "validation"):
            examples = records(split)
            with tf.io.TFRecordWriter(str(folder / f"{name}-{split}.tfrecord-00000-of-00001")) as writer:
                for record in examples:
                    writer.write(features.serialize_example(record))
            infos.append(tfds.core.SplitInfo(name=split, shard_lengths=[len(examples)], num_bytes=0))
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        tfds.folder_dataset.write_metadata(data_dir=str(folder), features=features, split_infos=infos, filename_template=template)
        file_utils.add_data_dir(str(tmp_path))

    yield make
    file_utils.clear_registered_data_dirs()
