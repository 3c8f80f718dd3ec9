"""A task as training sees it."""

from maelm_jax import config
from maelm_jax.finetuning import task_data


def test_own_names_the_label_of_its_f1(tmp_path, monkeypatch):
    (tmp_path / "own.tsv").write_text("sentence\tlabel\na\tno\nb\tyes\n")
    settings = config.Finetune(tasks="own", train_file=str(tmp_path / "own.tsv"), dev_file=str(tmp_path / "own.tsv"), labels=("no", "yes"))

    class Letters:
        bos, eos = 0, 2

        def encode_batch(self, texts):
            return [[ord(character) for character in text] for text in texts]

    found = task_data.load("own", settings, config.Corpus(), Letters(), 16)
    assert "f1 is that of the label 'yes'" in found.notes
