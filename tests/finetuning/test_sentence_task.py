"""The sentence tasks as training sees them."""

from maelm_jax import config
from maelm_jax.finetuning import sentence_task


def test_own_names_the_label_of_its_f1(tmp_path, monkeypatch):
    (tmp_path / "own.tsv").write_text("sentence\tlabel\na\tno\nb\tyes\n")
    path = str(tmp_path / "own.tsv")
    custom = config.CustomTask(train_file=path, dev_file=path, labels=("no", "yes"))
    settings = config.Finetune(tasks="own", custom=custom)

    class Letters:
        bos, eos = 0, 2

        def encode_batch(self, texts):
            return [[ord(character) for character in text] for text in texts]

    found = sentence_task.load("own", settings, config.Corpus(), Letters(), 16)
    assert "f1 is that of the label 'yes'" in found.notes
