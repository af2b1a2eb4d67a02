"""The errors that users can see.

A message states the value found, the rule it breaks and the nearest value that works. `exit_code` is the exit code of the
command line: 2 if the input is invalid (nothing was started), 1 if a run failed.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "ClusterError",
    "CommunicationError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "FileError",
    "FourfoldError",
    "HangError",
    "HostMemoryError",
    "Interrupted",
    "NetworkError",
    "OverBudget",
    "PlanError",
    "RankFailure",
    "ReleasedError",
    "ReplicaError",
    "RunDirError",
    "ScheduleError",
    "TrainingError",
]


class FourfoldError(Exception):
    """Base of all errors meant for users; the command line prints it without a traceback."""

    exit_code = 1


class ConfigError(FourfoldError, ValueError):
    """The config (what to train) is wrong."""

    exit_code = 2


class PlanError(FourfoldError, ValueError):
    """The plan (how to train it) is wrong, or no plan fits."""

    exit_code = 2


class ClusterError(FourfoldError, ValueError):
    """The cluster (what to train on) is wrong."""

    exit_code = 2


class ScheduleError(FourfoldError, ValueError):
    """A schedule or program is not valid, or cannot be built as requested."""

    exit_code = 2


class DataError(FourfoldError, ValueError):
    """A corpus is missing, empty, truncated or does not fit the model."""

    exit_code = 2


class FileError(FourfoldError):
    """A file cannot be read or written, or its content is damaged."""


class RunDirError(FourfoldError):
    """A run directory is in use, already holds a run, or cannot be written."""

    exit_code = 2


class CheckpointError(FourfoldError):
    """A checkpoint is missing, incomplete, damaged or does not fit the model."""


class CommunicationError(FourfoldError):
    """A rank failed or timed out waiting for another; says for what."""


class DeviceError(FourfoldError):
    """CUDA or NCCL cannot serve this rank: driver, memory, network; says what to change."""


class HangError(FourfoldError):
    """No rank of a job made progress for too long; says which rank the others waited for, and in what."""


class TrainingError(FourfoldError):
    """Training stopped because it could not continue (for example, too many consecutive non-finite steps)."""


class ReleasedError(FourfoldError, RuntimeError):
    """A sharded parameter was used while released."""


class ReplicaError(TrainingError):
    """Copies of a weight differ between ranks; says which weight, ranks and step. Nothing was saved after the last comparison."""


class Interrupted(FourfoldError):
    """The user ended the ranks by a second Ctrl-C or SIGTERM."""

    exit_code = 130


class RankFailure(FourfoldError):
    """A rank died, raised or hung; says which one was first."""

    after_stop = False
    """Whether the user had already requested a stop."""
    rank = -1
    """The rank at fault; -1: none in particular."""
    kind = ""
    """The cause: the name of an exception, or of a signal."""
    shown = 0.0
    """When the launcher knew and said it (Unix time)."""

    def __init__(self, *args: object):
        super().__init__(*args)
        self.reports: dict[int, dict[str, Any]] = {}
        """What the launcher knows about every rank, for the flight record."""


class OverBudget(FourfoldError, MemoryError):
    """A tensor does not fit in the memory budget of a test; says which, where it was made and what else is live."""


class HostMemoryError(FourfoldError, MemoryError):
    """The host has too little memory for offloaded state."""


class NetworkError(FourfoldError):
    """A shaped network cannot be created here, or its arguments are invalid."""
