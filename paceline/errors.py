"""Every error that settings, data, user code or the machine can cause. The CLI prints the message
without a traceback and exits with `exit_code`.

PacelineError                     1
├── ConfigError                   2   a setting is unknown, invalid or contradicts another
├── DataError                     3   a data file or row cannot be used
├── ModelError                    4   a model cannot be loaded or its shape is not supported
├── RewardError                   5   a reward function raised, timed out or returned no number
├── RolloutError                  6   generation failed or timed out
├── WorkerDied                    7   a process or task of the run ended unexpectedly
├── SyncError                     8   weights could not be transferred
├── StalledError                  9   the run made no progress; lists what each task waited for
├── CheckpointError              10   a run directory cannot be written, read or resumed
├── LedgerError                  11   the ledger does not balance (a bug in Paceline)
├── OutOfMemory                  12   a device is full; lists what uses its memory
├── MismatchError                13   engine and trainer do not have the same weights
└── NonFiniteError               14   losses or gradients are not finite, several updates in a row

A message says what happened, where, what was expected and what to do.
"""

import traceback

from paceline.printable import printable, redacted


class PacelineError(Exception):
    exit_code = 1

    def __str__(self) -> str:  # a message may quote a completion, a row or a log
        return printable(redacted(super().__str__()))


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


class NonFiniteError(PacelineError):
    exit_code = 14


def first_error(error: BaseException) -> BaseException:
    """Return the error that occurred first, without the groups that task groups wrap around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def frames_of(error: BaseException) -> traceback.StackSummary:
    """Return where an error was raised; of a group of errors, where the first one was."""
    return traceback.extract_tb(first_error(error).__traceback__ or error.__traceback__)
