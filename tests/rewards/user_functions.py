"""Reward functions as users write them, good and bad; the file is also named by its path."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandem.types import Episode, RewardResult, Task

NUMBER = 3


def length(task: Task, group: Sequence[Episode], per_character: float = 1.0) -> Any:
    """Numpy, which is what many give; and it prints, which must not disturb anything."""
    print("hello", flush=True)
    os.write(1, b"more\n")
    return np.array([len(episode.completion) * per_character for episode in group])


def details(task: Task, group: Sequence[Episode]) -> Any:
    return [
        RewardResult(np.float32(0.5), {"style": np.float32(0.25)}, ((np.int64(2), np.float32(0.5)),))
        if episode.completion
        else RewardResult.failed("nothing to judge")
        for episode in group
    ]


def sees(task: Task, group: Sequence[Episode]) -> Any:
    """What arrives is what was sent."""
    sample = group[1].samples[0]
    good = (
        task.info["level"] == 1
        and group[1].key.group == group[0].key.group
        and sample.tokens.tolist() == [1, 2, ord("b")]
        and str(sample.policy[0][0]) == "policy@0.0"
        and sys.stdin.read() == ""
    )
    return [float(good)] * len(group)


def reads(task: Task, group: Sequence[Episode]) -> Any:
    """Does what the first answer says."""
    match group[0].completion:
        case "nan":
            return [float("nan"), float("inf"), None, True]
        case "none":
            return None
        case "short":
            return [1.0]
        case "text":
            return ["good"] * len(group)
        case "string":
            return "good"
        case "number":
            return 1.0
        case "raise":
            raise KeyError("missing\nand more")
        case "nan result":
            return [RewardResult(float("nan"))] * len(group)
        case "exit":
            sys.exit("bye")
        case "die":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
            time.sleep(1000)
        case "slow":
            time.sleep(0.2)
    return [float(os.getpid())] * len(group)


def hangs_once(task: Task, group: Sequence[Episode], mark: str) -> Any:
    if not Path(mark).exists():
        Path(mark).touch()
        time.sleep(1000)
    return [1.0] * len(group)


def killed(task: Task, group: Sequence[Episode], marks: str, times: int) -> Any:
    died = len(os.listdir(marks))
    if died < times:
        (Path(marks) / str(died)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(died)] * len(group)


def takes_nothing() -> Any:
    return []
