"""Checkpoints that are written beside training: a copy of the state in main memory, and a thread that writes it."""

import threading
from collections.abc import Callable
from typing import Any

import torch


def copy_to_memory(value: Any) -> Any:
    """Returns a copy of a state dict in main memory, which later updates do not change.

    Mappings become dicts, and their attributes are left out; what no update changes in place is not copied.
    """
    if torch.is_tensor(value):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_memory(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copy_to_memory, value))
    return value


class BackgroundTask:
    """A function that runs in a thread, one at a time. Its failure is raised in the thread that asks for its end.

    The thread does not keep the process from ending: who wants the function to end waits for it.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def start(self, function: Callable[[], object]) -> None:
        """Waits for the end of the function before, as `wait` does, and starts `function`."""
        self.wait()
        self.thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Waits for the end of the function.

        Raises:
            BaseException: its failure, once.
        """
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    def raise_failure(self) -> None:
        """Raises the failure of a function that has ended, and does not wait for one that runs."""
        if not self.is_running:
            self.wait()

    def _run(self, function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # whoever waits raises it
            self.failure = error
