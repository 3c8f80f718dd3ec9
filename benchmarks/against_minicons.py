"""Compares the pseudo-log-likelihoods of minicons with those of `evaluate --pairs`.

    python benchmarks/against_minicons.py --model=pretrained --pairs='blimp/*.jsonl.xz'

--model is an export of an MLM or MAE-LM run. minicons runs the code in its folder. The command
prints the largest difference of a sentence, and the accuracy of both, as a mean over paradigms.
"""

import argparse
import itertools
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))


def main():
    """Runs the comparison."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--model", required=True, help="an exported folder")
    flags.add_argument("--pairs", required=True, help="glob of files of pairs")
    flags.add_argument("--count", type=int, default=4, help="pairs of each paradigm")
    flags.add_argument("--most", type=int, default=200, help="pairs in all")
    args = flags.parse_args()

    from minicons import scorer

    from maelm_jax.encoders.opened import load_model
    from maelm_jax.measuring import pairs

    groups = itertools.groupby(pairs.read(args.pairs), key=lambda pair: pair.paradigm)
    first = [list(itertools.islice(group, args.count)) for _, group in groups]
    chosen = list(itertools.chain(*first))[: args.most]
    sentences = [sentence for pair in chosen for sentence in (pair.good, pair.bad)]
    ours = pairs.log_likelihoods(load_model(args.model), sentences)
    model = scorer.MaskedLMScorer(args.model, "cpu", trust_remote_code=True)
    theirs = []
    for start in range(0, len(sentences), 20):
        # transformers 5 has no batch_encode_plus, which minicons calls for text.
        encoded = model.tokenizer(sentences[start : start + 20], padding="longest")
        theirs += model.sequence_score(encoded, reduction=lambda x: x.sum(0).item())
    theirs = np.array(theirs)
    print(f"{len(chosen)} pairs: largest difference {np.abs(ours - theirs).max():.2g} nats")
    for name, values in (("maelm_jax", ours), ("minicons", theirs)):
        good, bad = values.reshape(-1, 2).T
        credit, of_paradigm = np.where(good == bad, 0.5, good > bad), {}
        for pair, one in zip(chosen, credit, strict=True):
            of_paradigm.setdefault(pair.paradigm, []).append(one)
        mean = np.mean([np.mean(values) for values in of_paradigm.values()])
        print(f"{name}: {100 * mean:.1f} over {len(of_paradigm)} paradigms")


if __name__ == "__main__":
    main()
