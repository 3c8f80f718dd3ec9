"""Embeds each line of a text file as one vector, with the encoder of a run.

    python -m maelm_jax.embed --workdir=runs/tiny --input=lines.txt --output=vectors.npy
    python -m maelm_jax.embed --workdir=runs/tiny --input=lines.txt --output=cls.npy --pooling=first

The first command takes the mean over all tokens of a line, `<s>` and `</s>` included, as
sentence-transformers does. --pooling=first takes the hidden state of `<s>`.

The output is a float32 array [lines, width] in the order of the lines. The encoder reads
`<s>` line `</s>`, cut to the sequence length of the run. PyTorch is not needed.
"""

import dataclasses
import pathlib
import sys

import numpy as np
import tqdm

from maelm_jax import cli, config, outputs, storage

TOKENS = 16_384  # tokens of a batch, with padding
STEP = 16  # rows are padded to a multiple of this many tokens, so that JAX compiles few shapes


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--input", required=True, metavar="FILE", help="UTF-8 text, a line an embedding"
    )
    flags.add_argument("--output", required=True, metavar="FILE", help="the .npy file to write")
    flags.add_argument("--pooling", choices=("mean", "first"), default="mean", help="default mean")
    flags.add_argument(
        "--step",
        type=cli.whole_number(0),
        metavar="N",
        help="the checkpoint's step; default the newest",
    )
    args, experiment = cli.parse(flags, argv)
    lines = read_lines(args.input)
    outputs.check_file("--output", args.output)
    if not args.output.endswith(".npy"):
        raise config.ConfigError(f"--output={args.output}: name a file that ends in .npy")

    from maelm_jax.data import vocabulary as vocabularies
    from maelm_jax.encoders import source

    encoder_source = source.find(args.workdir, args.step)
    vocabulary = vocabularies.load(encoder_source.vocabulary)
    model = dataclasses.replace(
        encoder_source.model(experiment.model), dtype=experiment.model.dtype
    )
    length = min(experiment.corpus.sequence_length, model.max_positions)
    encoded = vocabulary.encode_batch(lines)
    rows = [[vocabulary.bos, *ids[: length - 2], vocabulary.eos] for ids in encoded]
    cut = sum(len(ids) > length - 2 for ids in encoded)

    vectors = embed(
        encoder_source.read(experiment.model), model, vocabulary, rows, length, args.pooling
    )
    save(args.output, vectors)
    shortened = f"; {cut} lines cut to {length} tokens" if cut else ""
    print(
        f"{args.output}: float32 {vectors.shape}, {args.pooling} of the states of step "
        f"{encoder_source.step}{shortened}"
    )
    return 0


def read_lines(path: str) -> list[str]:
    """Reads the lines of a UTF-8 file, without their line ends.

    Raises:
        ConfigError: The file is absent, empty or not UTF-8.
    """
    try:
        lines = pathlib.Path(path).read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise config.ConfigError(f"--input={path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise config.ConfigError(f"--input={path} is not UTF-8: byte {error.start}") from error
    lines = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    if not lines:
        raise config.ConfigError(f"--input={path} holds no line")
    return lines


def save(path: str, vectors: np.ndarray):
    """Writes a .npy file atomically. Makes its folder if there is none."""
    with outputs.writing("--output", path):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        with storage.atomic_file(path) as file:
            np.save(file, vectors)


def embed(
    params: dict, model: config.Model, vocabulary, rows: list[list[int]], length: int, pooling: str
) -> np.ndarray:
    """Embeds lists of token ids, in batches of similar length.

    Args:
        params: {parameter path: array}; only the encoder is used.
        model: The settings of the model.
        vocabulary: The vocabulary of the run.
        rows: The token ids of each line, at most `length` ids each.
        length: The longest input in tokens.
        pooling: "mean" or "first".

    Returns:
        float32 [lines, width], in the order of `rows`.
    """
    import jax
    import jax.numpy as jnp

    from maelm_jax.encoders import source
    from maelm_jax.model import maelm

    graph = maelm.encoder_graph(model, vocabulary.size, vocabulary.pad)
    parameters = jax.device_put(
        source.nested(
            {path: value for path, value in params.items() if path.startswith("encoder/")}
        )["encoder"]
    )

    @jax.jit
    def vectors(parameters, ids):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        present = (ids != vocabulary.pad).astype(jnp.int32)
        states = maelm.apply(graph, parameters)(ids, positions, present).astype(jnp.float32)
        weights = present if pooling == "mean" else (positions == 0).astype(jnp.int32)
        weights = weights.astype(jnp.float32)[:, :, None]
        return (states * weights).sum(1) / weights.sum(1)

    result = np.zeros((len(rows), model.width), np.float32)
    # The longest lines come first: if a batch does not fit in memory, the first one fails.
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    with tqdm.tqdm(
        total=len(rows),
        unit="line",
        desc="embedding",
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
    ) as bar:
        while order:
            padded = min(-(-len(rows[order[0]]) // STEP) * STEP, length)
            size = max(TOKENS // padded, 1)
            chosen, order = order[:size], order[size:]
            ids = np.full((size, padded), vocabulary.pad, np.int32)
            for row, number in zip(ids, chosen, strict=False):
                row[: len(rows[number])] = rows[number]
            ids[len(chosen) :, 0] = vocabulary.bos  # empty rows of the last batch; avoids 0 / 0
            result[chosen] = np.asarray(vectors(parameters, ids))[: len(chosen)]
            bar.update(len(chosen))
    return result


if __name__ == "__main__":
    cli.run(main)
