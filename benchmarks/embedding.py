r"""Compare the CPU seconds of `load_encoder(FOLDER).encode` with those of sentence-transformers.

    python benchmarks/embedding.py --encoder=MiniLM --texts=sentences.txt

The encoder is a folder of sentence-transformers, and each line of the file is a text. Two processes
take turns. Each encodes the same texts three times. The first time includes compilation here. Needs
requirements-torch.txt.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ARMS = ("maelm_jax", "sentence-transformers")
TURNS, REPEATS = 2, 3


def main():
    """Prints a line for each turn of each arm."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--encoder", required=True, help="folder of sentence-transformers")
    flags.add_argument("--texts", required=True, type=pathlib.Path, help="file of a text a line")
    flags.add_argument("--arm", choices=ARMS, help="measure one arm in this process")
    args = flags.parse_args()
    if args.arm:
        measure(args.arm, args.encoder, args.texts.read_text().splitlines())
        return
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    for _ in range(TURNS):
        for arm in ARMS:
            command = [sys.executable, __file__, *sys.argv[1:], f"--arm={arm}"]
            subprocess.run(command, env=environment, check=True)


def measure(arm: str, folder: str, texts: list[str]):
    """Prints the CPU seconds of each repetition, on all threads."""
    if arm == "maelm_jax":
        import maelm_jax

        encoder = maelm_jax.load_encoder(folder)
    else:
        import sentence_transformers

        encoder = sentence_transformers.SentenceTransformer(folder, device="cpu")
    seconds = []
    for _ in range(REPEATS):
        before = time.process_time()  # of all threads
        encoder.encode(texts)
        seconds.append(time.process_time() - before)
    print(f"{arm:<22}", *(f"{value:8.2f}" for value in seconds), "CPU seconds", flush=True)


if __name__ == "__main__":
    main()
