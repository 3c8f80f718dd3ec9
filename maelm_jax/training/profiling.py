"""A trace of some steps of a run, by JAX's profiler."""

import pathlib

import jax


class StepTrace:
    """Context manager that traces `steps` steps of this start on process 0.

    The trace begins with the third step of a start, because the first one is compiled and the
    second one waits for it. A run that ends earlier ends the trace.
    """

    def __init__(self, folder: pathlib.Path, start: int, steps: int):
        self._folder, self._first, self._last = folder, start + 3, start + 2 + steps
        self._is_tracing = False

    def __enter__(self):
        return self

    def step_begins(self, step: int, state):
        """Starts the trace if this step is the first one of it. `state` is that before the step."""
        if step == self._first <= self._last and not jax.process_index():
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self._folder))
            self._is_tracing = True

    def step_ends(self, step: int, state):
        """Ends the trace if this step is the last one of it. `state` is that after the step."""
        if self._is_tracing and step == self._last:
            jax.block_until_ready(state)
            self._stop(step)

    def __exit__(self, *_):
        self._stop("the end")

    def _stop(self, last: int | str):
        if not self._is_tracing:
            return
        self._is_tracing = False
        jax.profiler.stop_trace()
        print(
            f"profile of steps {self._first} to {last}: {self._folder}; open the .trace.json.gz "
            "in it at https://ui.perfetto.dev"
        )
