"""The checkpoints of a run that stay besides the newest ones, and the names of their exports."""

from maelm_jax import config
from maelm_jax.training import run_rows
from maelm_jax.training.workdir import Workdir

AFTER_WORDS = "chck_"  # how the names of `Run.keep_at_words` begin


def by_name(run: config.Run, words_per_row: float | None) -> dict[str, int]:
    """Returns the steps of `Run.keep_every`, `Run.keep_at` and `Run.keep_at_words`, ascending.

    Steps after the end of the run are left out.

    Args:
        run: The settings.
        words_per_row: Mean number of words in a row of a batch. None if it is not known.

    Returns:
        {name of an export: step}. A step of `keep_at_words` is the one nearest to a number of
        words. Its export has the name that the BabyLM challenge gives it (`chck_1M`). Any other is
        called `step_1000`.

    Raises:
        ConfigError: `Run.keep_at_words` is set, and `words_per_row` is not known.
    """
    steps = set(run.keep_at)
    if run.keep_every:
        steps.update(range(run.keep_every, run.train_steps + 1, run.keep_every))
    names = {f"step_{step}": step for step in steps}
    if run.keep_at_words:
        if not words_per_row:
            raise config.ConfigError(
                "Run.keep_at_words: the words of these rows were not counted. Remove the rows and "
                "prepare them again, or set Run.keep_at=(STEP, STEP)"
            )
        for words in run.keep_at_words:
            step = max(round(words / (words_per_row * run.batch_size)), 1)
            names[f"{AFTER_WORDS}{words / 1e6:.12g}M"] = step
    chosen = [(name, step) for name, step in names.items() if step <= run.train_steps]
    return dict(sorted(chosen, key=lambda one: one[1]))


def read(workdir: Workdir) -> dict[str, int]:
    """Returns `by_name` of a run of pretraining."""
    return by_name(workdir.read_settings().run, run_rows.words_per_row(workdir))
