"""What a result was measured on: nothing in, a few JSON-ready facts out. No machine is named, only its kind."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from moetriage import __version__
from moetriage.study.setting import Resources


def environment(resources: Resources) -> dict[str, object]:
    """Return the hardware and versions that numbers and times depend on."""
    facts: dict[str, object] = {
        "processor": _processor(),
        "usable_processors": len(os.sched_getaffinity(0)),
        "threads": resources.threads_of_a_job,
        "jobs": resources.jobs,
        "device": torch.cuda.get_device_name(resources.device) if resources.device_type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "moetriage": __version__,
    }
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
