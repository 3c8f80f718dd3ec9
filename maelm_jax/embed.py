"""Embeds each line of a text file as one vector, with any pretrained encoder.

    python -m maelm_jax.embed --workdir=runs/tiny --input=lines.txt --output=vectors.npy
    python -m maelm_jax.embed --workdir=runs/tiny --input=lines.txt --output=cls.npy --pooling=first
    python -m maelm_jax.embed --workdir=bert-base --input=lines.txt --output=vectors.npy

--workdir is a workdir, an exported folder, a folder of stock transformers with its tokenizer.json,
or a checkpoint of the published code. The first command takes the mean over all tokens of a line,
`<s>` and `</s>` included. A folder of sentence-transformers gives the vectors that
sentence-transformers gives with it: its pooling, modules, default prompt and length are applied.
--pooling=mean or --pooling=first (the hidden state of `<s>`) leaves these out. --normalize gives
each vector the length 1.

The output is a float32 array [lines, width] in the order of the lines. The encoder reads
`<s>` line `</s>`, cut to the longest input whose positions are trained: the sequence length of the
run (of a fine-tuned run, its MAX_LENGTH), or what the folder states. --max_length=N cuts at N
tokens. PyTorch is not needed.
"""

import dataclasses
import pathlib

from maelm_jax import cli, config, storage


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    flags = cli.parser(__doc__, reads_settings=False)
    cli.add_step_flag(flags)
    flags.add_argument(
        "--input", required=True, metavar="FILE", help="UTF-8 text, a line an embedding"
    )
    flags.add_argument("--output", required=True, metavar="FILE", help="the .npy file to write")
    default = "default that of a sentence-transformers folder, or mean"
    flags.add_argument("--pooling", choices=("mean", "first"), help=default)
    flags.add_argument("--normalize", action="store_true", help="divide each vector by its length")
    dtype = "of the computation; default that of the run, or float32"
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), help=dtype)
    flags.add_argument(
        "--max_length",
        type=cli.whole_number(3),
        metavar="N",
        help="tokens of a line, <s> and </s> included; default the encoder's longest input",
    )
    args = cli.arguments(flags, argv).args
    lines = read_lines(args.input)
    if not args.output.endswith(".npy") or pathlib.Path(args.output).is_dir():
        raise config.ConfigError(f"--output={args.output}: name a file that ends in .npy")
    folder = pathlib.Path(args.output).absolute().parent
    cli.require_writable("--output", args.output)

    import numpy as np

    from maelm_jax.encoders import opened

    loaded = opened.load_model(args.workdir, args.step)
    if args.dtype:
        compute = dataclasses.replace(loaded.model.compute, dtype=args.dtype)
        model = dataclasses.replace(loaded.model, compute=compute)
        loaded = loaded.replace(model=model)
    chosen = loaded.choose_recipe(args.pooling)
    if args.max_length is not None:
        positions = loaded.model.encoder.max_positions
        if args.max_length > positions:
            raise config.ConfigError(
                f"--max_length={args.max_length} is longer than the {positions} positions of "
                f"{args.workdir}. Give at most {positions}"
            )
        chosen = dataclasses.replace(chosen, length=args.max_length)
    encoded = loaded.vocabulary.encode_batch(chosen.prepare(lines))
    vectors = loaded.encode_ids(encoded, chosen, args.normalize)
    folder.mkdir(parents=True, exist_ok=True)
    with storage.atomic_file(args.output) as file:
        np.save(file, vectors)
    longer = sum(len(ids) > chosen.length - 2 for ids in encoded)
    shortened = f"; {longer} lines cut to {chosen.length} tokens" if longer else ""
    origin = args.workdir if loaded.step is None else f"step {loaded.step}"
    print(f"{args.output}: float32 {vectors.shape}, {chosen.describe()} of {origin}{shortened}")
    return 0


def read_lines(path: str) -> list[str]:
    """Reads the lines of a UTF-8 file, without their line ends.

    Raises ConfigError if the file is empty or not UTF-8.
    """
    with storage.reading(path, "convert it to UTF-8, e.g. with iconv -t UTF-8", UnicodeError):
        text = pathlib.Path(path).read_bytes().decode("utf-8-sig")
    lines = text.split("\n")
    lines = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    if not lines:
        raise config.ConfigError(f"--input={path} holds no line. Give a file with text")
    return lines


def command():
    """Runs `maelm-embed`, or `python -m maelm_jax.embed`."""
    cli.run(main)


if __name__ == "__main__":
    command()
