"""Profile of some updates of a run (`report.profile`): a trace of torch.profiler in the run directory."""

import os
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from engine.config.schema import Report
from engine.runtime.errors import UserError
from engine.runtime.ownership import RESULTS, claim


class StepProfiler:
    """Profiles the updates that `report.profile` names, if and when a run reaches the first of them.

    Args:
        directory: of the run, which gets the trace ``profile_step_S.json.gz`` of the updates until step S;
            ui.perfetto.dev and chrome://tracing show it.
    """

    def __init__(self, directory: Path, options: Report, device: torch.device):
        self.directory, self.device = directory, device
        self.begin, self.steps = options.profile or (-1, 0)
        self.running: profile | None = None

    def at_step(self, step: int) -> bool:
        """Begins or ends the profile, if it is time to after update `step`; returns whether that has taken time."""
        if step == self.begin and self.running is None:
            if self.device.type != "cuda":
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # without a GPU the profiler reports errors
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * (self.device.type == "cuda"))]
            self.running = profile(activities=activities, record_shapes=True, acc_events=True)
            self.running.start()
            return True
        if step == self.begin + self.steps and self.running is not None:
            self.close(step)
            return True
        return False

    def close(self, step: int) -> None:
        """Ends a profile that is running, and writes its trace."""
        if self.running is not None:
            running, self.running = self.running, None
            running.stop()
            path = self.directory / f"profile_step_{step}.json.gz"
            try:
                claim(self.directory, RESULTS, [path.name])
            except UserError as error:  # no reason to end the run
                print(f"warning: report.profile: {error}; the trace is not written", file=sys.stderr, flush=True)
                return
            running.export_chrome_trace(str(path))
            print(f"report.profile: {path}, for ui.perfetto.dev", flush=True)
