"""The settings of the length of a run and of what it leaves behind."""

from maelm_jax.settings import (
    Count,
    Minutes,
    Positive,
    Rows,
    Settings,
    Text,
    declare,
    setting,
)


@declare
class Run(Settings):
    """The length of a run and what it leaves behind."""

    train_steps: int = setting(125_000, "Length of the run.", "steps", ge=1, le=10**8)
    batch_size: Rows = setting(2048, "Rows of a step, over all devices and hosts.", "rows")
    batch_size_ramp: tuple[tuple[Rows, Positive], ...] = setting(
        (), "First batch sizes, ascending: (rows of a step, steps with it). Then `batch_size`."
    )
    accumulate: Rows = setting(1, "Microbatches that a step is computed in.", "microbatches")
    seed: int = setting(
        0,
        "Seed of data order, weights and masks. All but the order use its last 32 bits.",
        ge=0,
        le=2**63 - 1,
    )
    deterministic: bool = setting(
        False, "True gives the same losses each time on a GPU, more slowly. CPU and TPU always do."
    )
    init_from: Text | None = setting(
        None, "Weights to start from: a workdir, an exported or stock folder, a published .pt."
    )
    log_every: Positive = setting(100, "Steps between lines of metrics.", "steps")
    eval_every: Positive = setting(5_000, "Steps between evaluations.", "steps")
    eval_rows: Positive = setting(4096, "Rows of an evaluation, the same each time.", "rows")
    rank_every: Count = setting(5_000, "Steps between effective ranks. 0 is never.", "steps")
    checkpoint_every: Positive = setting(
        5_000,
        "Steps between checkpoints. One more is written before the mask rate or the batch "
        "size changes.",
        "steps",
    )
    checkpoint_minutes: Minutes | None = setting(
        None, "A checkpoint also when this long has passed since the last one.", "minutes"
    )
    keep_checkpoints: Positive = setting(3, "Newest checkpoints that are kept.", "checkpoints")
    keep_every: Positive | None = setting(
        None, "Checkpoints at multiples of this step are kept too.", "steps"
    )

    def check(self):
        sizes = [size for _, size in self.named_batch_sizes]
        self.require(
            sizes == sorted(set(sizes)),
            f"batch_size_ramp must ascend to batch_size {self.batch_size}, "
            f"got {self.batch_size_ramp}",
        )

    @property
    def named_batch_sizes(self) -> list[tuple[str, int]]:
        """(name of the setting, rows of a step) of all batch sizes of the run, in their order."""
        ramp = [("Run.batch_size_ramp", size) for size, _ in self.batch_size_ramp]
        return [*ramp, ("Run.batch_size", self.batch_size)]
