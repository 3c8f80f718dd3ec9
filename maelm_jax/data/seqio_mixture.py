"""Registers the sources of a config as seqio Tasks and a Mixture, for programs that use seqio."""

import hashlib
import typing

from maelm_jax.config import Corpus
from maelm_jax.data import sources, vocabularies
from maelm_jax.data.seqio_tasks import SPLIT, import_seqio


def seqio_vocabulary(vocabulary: vocabularies.Vocabulary):
    """Returns the vocabulary as a seqio.Vocabulary.

    seqio's base class takes 0 as the padding id and stops decoding at the first `</s>`. This class
    has the vocabulary's padding id and decodes all ids.
    """
    seqio = import_seqio()
    import tensorflow

    class SeqioVocabulary(seqio.Vocabulary):
        fingerprint = vocabulary.fingerprint
        bos_id = property(lambda self: vocabulary.bos)
        eos_id = property(lambda self: vocabulary.eos)
        pad_id = property(lambda self: vocabulary.pad)
        unk_id = property(lambda self: vocabulary.unk)
        mask_id = property(lambda self: vocabulary.mask)
        _base_vocab_size = property(lambda self: vocabulary.size)

        def _encode(self, s):
            return vocabulary.encode(s)

        def _decode(self, ids):
            return vocabulary.decode([int(i) for i in ids])

        decode = _decode

        def _encode_tf(self, s):
            def encode(value):
                ids = vocabulary.encode(value.numpy().decode("utf-8"))
                return tensorflow.constant(ids, tensorflow.int32)

            ids = tensorflow.py_function(encode, [s], tensorflow.int32)
            ids.set_shape([None])
            return ids

        def _decode_tf(self, ids):
            return tensorflow.py_function(
                lambda row: vocabulary.decode(row.numpy().tolist()), [ids], tensorflow.string
            )

        decode_tf = _decode_tf

        def __eq__(self, other):
            return getattr(other, "fingerprint", None) == vocabulary.fingerprint

        def __hash__(self):
            return hash(vocabulary.fingerprint)

    return SeqioVocabulary()


def register(corpus: Corpus, vocabulary: vocabularies.Vocabulary) -> str:
    """Registers each source as a seqio Task and all of them as a Mixture by their rates.

    A `seqio:` source is a Task already and enters the Mixture unchanged, with all documents. The
    other Tasks give examples with `targets` (ids) and `targets_pretokenized` (one document). They
    leave out the documents that training holds out. seqio_cache_tasks can cache them.

    Args:
        corpus: The sources and their rates.
        vocabulary: Turns text into ids.

    Returns:
        The name of the Mixture.
    """
    seqio = import_seqio()
    rates = sources.rates(corpus)
    request = f"{vocabulary.fingerprint} {corpus}"
    mixture = f"maelm_{hashlib.sha256(request.encode()).hexdigest()[:12]}"
    names = []
    for source, rate in rates.items():
        name = source.removeprefix("seqio:")
        if name == source:
            name = f"{mixture}_{hashlib.sha256(source.encode()).hexdigest()[:8]}"
        if name not in seqio.TaskRegistry.names():
            seqio.TaskRegistry.add(
                name,
                source=seqio.FunctionDataSource(_dataset_function(source, corpus), splits=[SPLIT]),
                preprocessors=[seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()],
                output_features={
                    "targets": seqio.Feature(seqio_vocabulary(vocabulary), add_eos=False)
                },
            )
        names.append((name, rate))
    if mixture not in seqio.MixtureRegistry.names():
        seqio.MixtureRegistry.add(mixture, names)
    return mixture


def _dataset_function(source: str, corpus: Corpus) -> typing.Callable:
    def dataset(split, shuffle_files, seed=None):
        import tensorflow

        del split, shuffle_files, seed  # there is one split, in one order

        def examples():
            for text in sources.documents_of(source, corpus):
                if not sources.is_heldout(text, corpus.heldout_fraction):
                    yield {"targets": text}

        signature = {"targets": tensorflow.TensorSpec((), tensorflow.string)}
        return tensorflow.data.Dataset.from_generator(examples, output_signature=signature)

    return dataset
