"""Runs in an imitated target before anything else: this folder leads its PYTHONPATH."""

import os

# Taken out of the environment: processes that the worker starts imitate nothing.
if _times := os.environ.pop("OUTRIDER_IMITATED_STEP_TIMES", ""):
    try:
        from benchmarks.end_bench.imitated_target import imitate
        from benchmarks.end_bench.step_times import StepTimes

        imitate(StepTimes.parse(_times))
    except Exception as error:
        # Whatever else is raised here, Python goes on: with steps that take no time.
        raise SystemExit(f"the target cannot be imitated: {error!r}") from error
