"""Critic role: predicts the expected reward of each state and learns it from returns."""

from paceline.algo.loss import ValueLoss
from paceline.algo.settings import AlgorithmSettings
from paceline.errors import DataError
from paceline.training.actor import train_on
from paceline.training.engine import TrainEngine
from paceline.training.settings import TrainSettings
from paceline.types import Batch, FloatArray


class Critic:
    """Critic on a train engine with a value head."""

    def __init__(
        self,
        engine: TrainEngine,
        algorithm: AlgorithmSettings,
        train: TrainSettings,
        total_steps: int,
    ) -> None:
        self.engine = engine
        self._algorithm, self._train, self._total_steps = algorithm, train, total_steps

    def values(self, batch: Batch) -> FloatArray:
        """Return the value of the state in which each token was sampled; 0 outside mask: [T]."""
        return self.engine.values(batch)

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on a batch with returns and values, and return the metrics."""
        if batch.returns is None or batch.values is None:
            raise DataError(
                "the batch has no returns or values: "
                "compute them with paceline.algo.advantage.advantages first"
            )
        lr = self._train.learning_rate_at(step, self._total_steps)
        return train_on(
            self.engine, batch, ValueLoss(self._algorithm.value_clip), self._algorithm, lr, step
        )
