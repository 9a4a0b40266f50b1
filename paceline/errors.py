"""Every error a user can meet. The CLI prints the message and exits with `exit_code`; no traceback.

PacelineError                     1
├── ConfigError                   2   a setting is unknown, mistyped or contradicts another
├── DataError                     3   a data file or row cannot be used
├── ModelError                    4   a model cannot be loaded or its shape is not supported
├── RewardError                   5   a reward raised, hung or returned something that is not a number
├── RolloutError                  6   generation failed or took too long
├── WorkerDied                    7   a process or coroutine of the run ended when it should not have
├── SyncError                     8   new weights could not be handed over
├── StalledError                  9   nothing moved for too long; says what was being waited for
├── CheckpointError              10   a run folder cannot be written, read or continued
├── LedgerError                  11   the books do not add up (a bug in Paceline)
├── OutOfMemory                  12   a device is full; says what holds its memory
└── MismatchError                13   engine and trainer do not have the same weights

Messages say what, where, what was expected and what to do.
"""


class PacelineError(Exception):
    exit_code = 1


class ConfigError(PacelineError, ValueError):
    exit_code = 2


class DataError(PacelineError, ValueError):
    exit_code = 3


class ModelError(PacelineError, ValueError):
    exit_code = 4


class RewardError(PacelineError):
    exit_code = 5


class RolloutError(PacelineError):
    exit_code = 6


class WorkerDied(PacelineError):
    exit_code = 7


class SyncError(PacelineError):
    exit_code = 8


class StalledError(PacelineError, TimeoutError):
    exit_code = 9


class CheckpointError(PacelineError):
    exit_code = 10


class LedgerError(PacelineError):
    exit_code = 11


class OutOfMemory(PacelineError, MemoryError):
    exit_code = 12


class MismatchError(PacelineError):
    exit_code = 13


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that started the fall, out of the groups that task groups wrap around it."""
    first = group.exceptions[0]
    return first_error(first) if isinstance(first, BaseExceptionGroup) else first
