"""SIGTERM inside the training loop: it is recorded, and the run stops after a step.

maelm_jax/stopping.py handles SIGTERM before and after the loop.
"""

import signal

from jax.experimental import multihost_utils

from maelm_jax.training import coordination, process_exit


class SigtermWatcher:
    """Context manager that records SIGTERM. All processes of a run stop after the same step."""

    def __enter__(self):
        self._started, self._received, self._reported = False, False, False
        self._handler_before = None
        return self

    def start(self):
        """Starts recording SIGTERM. The loop calls it when the first step is compiled.

        Before that, SIGTERM ends the run at once (stopping.py): there is nothing to save.
        """
        if self._started:
            return
        self._started = True
        if coordination.is_multi_process():
            process_exit.record_sigterm()
        else:
            # stopping.py reads this descriptor. It must not see a signal that is handled here.
            self._descriptor_before = signal.set_wakeup_fd(-1)
            self._handler_before = signal.signal(signal.SIGTERM, self._record)

    def _record(self, *_):
        self._received = True

    def stops_after(self, step: int) -> bool:
        """Returns whether the run stops after this step. Call it once for every step."""
        if coordination.is_multi_process():
            return multihost_utils.reached_preemption_sync_point(step)
        self._reported = self._received
        return self._reported

    def __exit__(self, error, *_):
        if self._handler_before is not None:
            signal.signal(signal.SIGTERM, self._handler_before)
            signal.set_wakeup_fd(self._descriptor_before, warn_on_full_buffer=False)
        # The signal came while the last step was saved: deliver it again.
        if self._received and not self._reported and not error:
            signal.raise_signal(signal.SIGTERM)
