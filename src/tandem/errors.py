"""Every exception that Tandem raises on purpose.

    TandemError
    |-- UserError               the input is wrong: exit code 2
    |   |-- ConfigError         a recipe or an override (also ValueError)
    |   |-- RegistryError       a component's name (also LookupError)
    |   |-- DataError           a dataset, a task, a prompt (also ValueError)
    |   |-- ModelError          a model or tokenizer directory (also ValueError)
    |   |-- DeviceError         hardware that is asked for and absent (also ValueError)
    |   |-- RewardError         a reward function that breaks its contract (also ValueError)
    |   `-- SandboxError        walls that are asked for and that this machine does not give (also RuntimeError)
    `-- RunError                the run failed: exit code 1
        |-- ColumnError         columns or keys of a batch that do not fit (also ValueError)
        |-- PlanError           no stage gives a column (also LookupError)
        |-- EngineError         a rollout or training engine (also RuntimeError)
        |-- NonFiniteError      NaN or infinity in a loss or a gradient (also ArithmeticError)
        |-- EmptyBatchError     nothing left to train on (also RuntimeError)
        |-- StalenessError      a sample older than its bound at consumption (also RuntimeError)
        |-- QueueError          a lease, a group or a place of the TransferQueue (also RuntimeError)
        |-- SnapshotError       a snapshot that cannot be written or read (also OSError)
        |-- WorkerError         a worker process that died, or that cannot be started or reached (also RuntimeError)
        `-- StalledError        a named wait without progress (also TimeoutError)

A message says what happened, with which value, and what to do. `assert` marks a bug of Tandem's own and nothing else.
"""

from typing import ClassVar


class TandemError(Exception):
    """The root; `exit_code` is what the command line returns."""

    exit_code: ClassVar[int] = 1


class UserError(TandemError):
    """The input is wrong and the message says how to mend it."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError, ValueError):
    """One or more problems in a recipe or its overrides, all of them in one message."""


class RegistryError(UserError, LookupError):
    """A component's name that resolves to nothing; the message lists what exists."""


class DataError(UserError, ValueError):
    """A dataset, a task or a prompt that cannot be used."""


class ModelError(UserError, ValueError):
    """A model or tokenizer directory that cannot be used."""


class DeviceError(UserError, ValueError):
    """Hardware that is asked for and is not there."""


class RewardError(UserError, ValueError):
    """A reward function that breaks its contract: wrong count, wrong type, not importable."""


class SandboxError(UserError, RuntimeError):
    """Walls around untrusted code that are asked for and that this machine does not give."""


class RunError(TandemError):
    """The run failed although its input was understood."""


class ColumnError(RunError, ValueError):
    """Columns, lengths or keys of a batch that do not fit together."""


class PlanError(RunError, LookupError):
    """A column that is needed and that no stage gives."""


class EngineError(RunError, RuntimeError):
    """A rollout or training engine that cannot do what it is asked."""


class NonFiniteError(RunError, ArithmeticError):
    """NaN or infinity in a loss, a gradient or a statistic."""


class EmptyBatchError(RunError, RuntimeError):
    """A step with nothing left to train on."""


class StalenessError(RunError, RuntimeError):
    """A sample older than its bound where it is consumed."""


class QueueError(RunError, RuntimeError):
    """A lease, a group or a place of the TransferQueue that is used against its rules."""


class SnapshotError(RunError, OSError):
    """A snapshot that cannot be written or read."""


class WorkerError(RunError, RuntimeError):
    """A worker process that died, or that cannot be started or reached."""


class StalledError(RunError, TimeoutError):
    """A named wait in which nothing moved for its limit."""
