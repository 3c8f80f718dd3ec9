"""Pretrain a text encoder: MAE-LM, the MLM baseline, or anything between.

    python -m maelm_jax.train --gin_file=tiny.gin                                  a small encoder, on text that is already on this machine
    python -m maelm_jax.train --gin_file=tiny.gin --gin_file=mlm.gin               its MLM twin
    python -m maelm_jax.train --gin_file=small.gin --gin.TEXT_FILES='books/*.txt'  your own text
    python -m maelm_jax.train --gin_file=base.gin --dry_run                        sizes, FLOPs, memory and mesh, without any data

The workdir holds all of it: config.gin, environment.txt, vocabulary/, metrics.jsonl, tensorboard/, checkpoints/, loss_curve.png. The same
command started again goes on from the newest checkpoint. Exit status: 0 done, 143 stopped by SIGTERM (and saved), 2 wrong input, 3 diverged,
1 anything else.
"""

import argparse
import dataclasses
import logging
import os
import pathlib
import time

import numpy as np

from maelm_jax import cli, config, gin_files, storage


def main(argv: list[str]) -> int:
    began = time.perf_counter()
    flags = cli.parser(__doc__)
    flags.add_argument("--dry_run", action="store_true", help="print parameters, FLOPs, memory and mesh, then stop; reads no data")
    flags.add_argument(
        "--accept_new_data", action="store_true", help="go on with other rows than the run began with, and record that (rows.json)"
    )
    cli.add_process_flags(flags)
    args, experiment = cli.parse(flags, argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("maelm_jax").setLevel(logging.INFO)
    if storage.in_bucket(args.workdir):
        storage.fetch_files(args.workdir, ("config.gin", "environment.txt", "changes.txt", "rows.json"))
    experiment, source = starting_point(experiment, args.workdir)
    cli.check_workdir(args.workdir, experiment)

    from maelm_jax.training import distributed, run_record, workdir_lock

    with distributed.joined(args.coordinator, args.processes, args.process, args.peer_timeout):
        if args.dry_run:
            return train(args, experiment, source, began)
        with workdir_lock.held(args.workdir):
            run_record.check(args.workdir)
            return train(args, experiment, source, began)


def train(args: argparse.Namespace, experiment: config.Experiment, source, began: float) -> int:
    """The run, on one process or as one of several, from `source` (a pretrained.Pretrained) or from scratch; the exit status."""
    import jax

    from maelm_jax import pretrained
    from maelm_jax.analysis import watch
    from maelm_jax.model import maelm
    from maelm_jax.training import checkpoint, distributed, loop, metrics, optimizer, resume, row_record, run_record, sharding, step

    distributed.same_start(experiment, args.workdir)
    before = resume.read(args.workdir)
    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check(experiment, mesh)
    if args.dry_run:
        dry_run(experiment, mesh)
        return 0

    # Text becomes rows of ids once; from then on neither TensorFlow nor seqio is needed.
    from maelm_jax.data import batches, rows
    from maelm_jax.data import vocabulary as vocabularies

    if not storage.in_bucket(args.workdir):
        distributed.same_folder(args.workdir, "workdir")
    own = storage.here(args.workdir) / "vocabulary"  # of a run that goes on
    with distributed.first("vocabulary"):
        vocabulary = vocabularies.load(own) if vocabularies.files_in(own) else rows.vocabulary_for(experiment.vocabulary, experiment.corpus)
    if source:
        source.check_vocabulary(vocabulary)
    data = row_record.choose_rows(args.workdir, experiment.corpus, vocabulary, args.accept_new_data)
    stores, rates = data.stores, data.rates

    special = vocabulary.special
    graph, init = maelm.create(experiment.model, vocabulary.size, special)
    updates = optimizer.create(experiment.optimizer, experiment.run.train_steps)
    loss_fn = step.pretraining_loss(experiment, graph, special)
    seed = experiment.run.seed

    nats = unigram_nats(stores, rates, vocabulary.size, special)

    places = sharding.local_places(experiment.run.batch_size, mesh)
    train = batches.Batches({name: store["train"] for name, store in stores.items()}, rates, experiment.run.batch_size, seed, places)
    heldout = batches.heldout({name: store["heldout"] for name, store in stores.items()}, rates, experiment.run.eval_rows)
    eval_size = experiment.run.batch_size // experiment.run.accumulate
    print(mask_rate(experiment.masking, *count_tokens(heldout, special), "in the held-out rows"))
    ranks = watch.Watch(experiment, vocabulary.size, special, heldout, mesh)
    padding = np.full((-len(heldout) % eval_size, heldout.shape[1]), special.pad, heldout.dtype)  # rows of padding have nothing to predict
    heldout = np.concatenate([heldout, padding]).reshape(-1, eval_size, heldout.shape[1])
    eval_places = sharding.local_places(eval_size, mesh)
    unigram = unigram_cross_entropy(experiment, nats, heldout, special)
    learning_rates = np.asarray(optimizer.schedule(experiment.optimizer, experiment.run.train_steps)(np.arange(experiment.run.train_steps)))
    terms = metrics.flops_terms(experiment, vocabulary.size)
    peak = metrics.peak_flops(experiment.model.dtype)
    tokens = experiment.run.batch_size * experiment.corpus.sequence_length
    print(f"model FLOPs a step: {sum(terms.values()):.3g} = " + " + ".join(f"{value:.3g} {name}" for name, value in terms.items() if value))
    print(metrics.describe_peak(peak))
    print(f"unigram cross-entropy of the held-out targets: {unigram:.4f} nats; an encoder that has learned something is below it")

    # Where the state comes from, the first that applies: (1) the workdir's newest whole checkpoint, (2) init_from's parameters, (3) scratch.
    # Nothing waits for it from here to the loop: weights are drawn while the step is compiled.
    state, new_head = step.create_state(init, updates, seed, mesh), True
    checkpoints = checkpoint.Checkpoints(args.workdir, experiment.run.keep_checkpoints, experiment.run.keep_every)
    resumed = checkpoints.restore(state)
    if resumed is not None:
        state, new_head = resumed[1], False
        resume.check_length(args.workdir, resumed[0], experiment.run.train_steps)
        print("\n".join([f"resuming {args.workdir} at step {resumed[0]}", *(resume.effects(before, experiment, resumed[0]) if before else [])]))
    elif source:
        params, fresh, unused = pretrained.place(source.read(experiment.model), state.params, vocabulary.size, source.path)
        state, new_head = state._replace(params=params), "head" in fresh
        listed = [" and ".join(names) or "nothing" for names in (fresh, unused)]
        print(f"starting from {source.path} ({source.kind}); with fresh weights: {listed[0]}; left out of it: {listed[1]}")
    if experiment.model.unigram_bias and new_head:
        zeros = state.params["head"]["bias"]
        bias = unigram_bias(nats, len(zeros), special)
        state.params["head"]["bias"] = jax.make_array_from_callback(zeros.shape, zeros.sharding, lambda index: bias[index])

    print(
        f"{sum(x.size for x in jax.tree.leaves(state.params)):,} parameters; {experiment.run.train_steps:,} steps of {tokens:,} tokens; "
        f"mesh {dict(mesh.shape)}",
        flush=True,
    )

    if not jax.process_index():  # from here on the workdir is changed
        if before:
            resume.record(args.workdir, resumed[0] if resumed else 0, resume.changes(before.experiment, experiment))
        run_record.write(storage.here(args.workdir), experiment, vocabulary)
        row_record.write(args.workdir, data, resumed[0] if resumed else 0)
        storage.send(args.workdir)

    eval_step = step.make_eval_step(loss_fn, state, seed, mesh)

    def evaluate(state) -> tuple[step.State, dict[str, float]]:
        parts = [sharding.place(part[eval_places], mesh, eval_size) for part in heldout]
        sums = [eval_step(state.params, part, np.uint32(i * eval_size)) for i, part in enumerate(parts)]
        loss, correct, count = np.sum([jax.device_get(part) for part in sums], axis=0, dtype=np.float64)
        return state, {"eval_loss": loss / count, "eval_accuracy": correct / count, "unigram": unigram}

    job = loop.Job(
        run=experiment.run,
        train_step=step.make_train_step(loss_fn, updates, state, seed, experiment.run.accumulate, mesh),
        batch=lambda number: sharding.place(train.batch(number), mesh, experiment.run.batch_size),
        evaluate=evaluate,
        learning_rates=learning_rates,
        tokens_per_step=float(tokens),
        flops_per_step=sum(terms.values()),
        peak_flops=peak.flops_per_second,
        measures=((experiment.run.rank_every, ranks),),
    )
    first = resumed[0] if resumed else 0
    writer = metrics.Writer(args.workdir, first)
    if first == experiment.run.train_steps and not any(line["step"] == first and "eval_loss" in line for line in metrics.read(args.workdir)):
        writer.write(first, evaluate(state)[1])  # the run was cut short at a step that had no evaluation
    try:
        state, status = loop.run(job, state, first, writer, checkpoints)
    finally:
        writer.close()
        checkpoints.close()
    if status == loop.STOPPED:
        print(f"stopped by SIGTERM at step {int(state.step)}; the same command goes on from there")
        return status
    if jax.process_index():
        return 0
    took = time.perf_counter() - began
    print(ranks.cost(took))
    last = [line for line in metrics.read(args.workdir) if "eval_loss" in line][-1]
    picture = metrics.plot(args.workdir, unigram)
    storage.send(args.workdir)
    print(
        f"done: step {last['step']}, held-out loss {last['eval_loss']:.4f} nats, {unigram - last['eval_loss']:.2f} below the unigram cross-entropy "
        f"{unigram:.4f}; accuracy {last['eval_accuracy']:.3f}; {took:.0f} s in all\nloss curve: {picture}"
    )
    return 0


def starting_point(experiment: config.Experiment, workdir: str):
    """(settings with those of Run.init_from taken over, what it names or None). A run that has a checkpoint does not need its source any more."""
    path = experiment.run.init_from
    if not path:
        return experiment, None
    from maelm_jax import pretrained

    if not os.path.exists(path) and any(pathlib.Path(workdir).glob("checkpoints/[0-9]*")):
        before = gin_files.load([os.path.join(workdir, "config.gin")])
        taken = {name: getattr(before.model, name) for name in (*pretrained.ENCODER, *pretrained.DECODER)}
        vocabulary = dataclasses.replace(experiment.vocabulary, file=experiment.vocabulary.file or before.vocabulary.file)
        return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **taken), vocabulary=vocabulary), None
    source = pretrained.find(path)
    experiment, said = pretrained.adopt(experiment, source)
    if said:
        print(f"taken over from {path}: {'; '.join(said)}")
    return experiment, source


def unigram_nats(stores, rates: dict[str, float], vocabulary_size: int, special: config.SpecialIds) -> np.ndarray:
    """float64 [vocabulary]: -log of each token's frequency in a sample of the training rows, add-one smoothed; special tokens are not counted."""
    counts = np.ones(vocabulary_size)
    for name, rate in rates.items():
        store = stores[name]["train"]
        sample = store[np.linspace(0, len(store) - 1, min(len(store), 8192)).astype(np.int64)]
        found = np.bincount(sample.ravel(), minlength=vocabulary_size).astype(np.float64)
        found[list(special.never_masked)] = 0
        counts += rate * 1e7 * found / max(found.sum(), 1)
    counts[list(special.never_masked)] = 0
    return -np.log(np.maximum(counts, 1e-300) / counts.sum())


def unigram_bias(nats: np.ndarray, rows: int, special: config.SpecialIds) -> np.ndarray:
    """float32 [rows], what the head's bias starts at with Model.unigram_bias: the log of the tokens' frequencies; of a special token, that of the
    rarest other; 0 at the rows that pad the vocabulary."""
    bias = np.zeros(rows, np.float32)
    bias[: len(nats)] = -nats
    bias[list(special.never_masked)] = -np.delete(nats, special.never_masked).max()
    return bias


def unigram_cross_entropy(experiment: config.Experiment, nats: np.ndarray, heldout, special: config.SpecialIds) -> float:
    """The mean of `nats` over the held-out targets, the very ones of the evaluation. `heldout` is int32 [evaluation batches, rows, L]."""
    import jax

    from maelm_jax.model import keys, loss, masking

    sizes = masking.budget(experiment.masking, experiment.corpus.sequence_length)
    mask_key = jax.random.split(jax.random.fold_in(keys.of_seed(experiment.run.seed), 2))[0]

    @jax.jit
    def targets(part, numbers):
        mask_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(mask_key, numbers)
        return loss.targets(masking.draw(mask_keys, part, experiment.masking, sizes, special))

    total = count = 0.0
    size = heldout.shape[1]
    for i, part in enumerate(heldout):
        ids, weights = jax.device_get(targets(part, np.arange(i * size, (i + 1) * size, dtype=np.uint32)))
        weights = weights * ~np.isin(ids, special.never_masked)
        total, count = total + float((nats[ids] * weights).sum()), count + float(weights.sum())
    return total / max(count, 1.0)


def count_tokens(rows: np.ndarray, special: config.SpecialIds) -> tuple[int, int]:
    """(tokens, text tokens) of rows: the first without padding, the second without `<s>` and `</s>` as well."""
    return int((rows != special.pad).sum()), int((~np.isin(rows, special.never_masked)).sum())


def mask_rate(masking: config.Masking, tokens: int, text: int, where: str) -> str:
    """The mask rate in words. It counts all tokens but selects among text tokens, so of those it is higher."""
    if masking.mask_special_tokens:
        return f"mask rate {masking.rate:g} of all tokens, <s> and </s> among them"
    share = masking.rate * tokens / max(text, 1)
    return f"mask rate {masking.rate:g} of all tokens = {share:.4f} of text tokens {where} (<s> and </s> count, but are not masked)"


def dry_run(experiment: config.Experiment, mesh):
    """Prints the parameter table, FLOPs by term, memory by kind and the mesh; compiles the real step, allocates nothing."""
    import jax

    from maelm_jax.model import masking
    from maelm_jax.training import metrics, sharding, step

    train_step, state, batch = step.abstract(experiment, mesh)
    print(f"{'parameter':<42}{'shape':>20}{'values':>14}  sharding")
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        path = sharding.path_of(keys)
        print(f"{path:<42}{'x'.join(map(str, leaf.shape)):>20}{leaf.size:>14,}  {tuple(sharding.spec(path))}")
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(f"{'all':<42}{'':>20}{count:>14,}\n")

    run, length = experiment.run, experiment.corpus.sequence_length
    sizes = masking.budget(experiment.masking, length)
    print(
        f"mesh {dict(mesh.shape)} of {mesh.devices.flat[0].device_kind}; {run.batch_size} rows of {length} tokens a step in {run.accumulate} part(s)"
    )
    print(f"encoder slots {sizes.visible}, masked slots {sizes.masked} a row")
    print(mask_rate(experiment.masking, length, length - 2, f"at {length} tokens a segment of one line"))
    terms = metrics.flops_terms(experiment, experiment.vocabulary.size)
    for name, value in terms.items():
        print(f"{name:<20}{value:>12.4g} FLOPs a step {value / sum(terms.values()):>8.1%}")
    print(f"{'all':<20}{sum(terms.values()):>12.4g} FLOPs a step, {sum(terms.values()) * run.train_steps:.4g} in {run.train_steps:,} steps\n")

    memory = train_step.lower(state, batch).compile().memory_analysis()
    gib = lambda n: f"{n / 2**30:>9.3f} GiB"  # noqa: E731
    print(f"parameters          {gib(4 * count)} in all")
    print(f"Adam's moments      {gib(8 * count)} in all")
    print(f"state               {gib(memory.argument_size_in_bytes)} per device, batch included")
    print(f"activations, gradients, temporaries {gib(memory.temp_size_in_bytes)} per device (this backend's compiler)")


if __name__ == "__main__":
    cli.run(main, trains=True)
