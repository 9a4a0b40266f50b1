"""Training and generation at the same time on one GPU: the speed that each keeps.

    python benchmarks/gpu_overlap.py [--out benchmarks/results/gpu_overlap.json]

Updates of the Qwen2.5-0.5B shape repeat in one thread while the engine decodes in another, with its
bursts kept short as before a weight sync: first without a limit on how far the host runs ahead of
the GPU, then with the limit that overlap sets. The fractions are those of the speed alone. Taking
turns would reach a sum of 1.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_load import PROMPT, make_model, make_requests  # noqa: E402
from benchmarks.gpu_train import make_batch  # noqa: E402
from benchmarks.report import RESULTS, command_line, gpu_circumstances, write  # noqa: E402
from paceline.algo.loss import PolicyLoss  # noqa: E402
from paceline.algo.settings import AlgorithmSettings  # noqa: E402
from paceline.remote.host import SWITCH_S  # noqa: E402
from paceline.rollout.native.engine import NativeEngine  # noqa: E402
from paceline.training.settings import TrainSettings  # noqa: E402
from paceline.training.single import SingleDevice  # noqa: E402

LONGEST, SLOTS = 4096, 512
SEQUENCES = (512, 256, 64, 8)


class Trainer:
    """Repeats updates in a thread."""

    def __init__(self, engine: SingleDevice) -> None:
        self._engine = engine
        self._batch = make_batch(50, 1)
        self._loss = PolicyLoss(AlgorithmSettings())
        self.update()

    def update(self) -> None:
        self._engine.forward_backward(self._batch, self._loss)
        self._engine.optimizer_step(1e-6)
        torch.cuda.current_stream().synchronize()

    def __enter__(self) -> "Trainer":
        self.tokens, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.update()
            self.tokens += self._batch.num_tokens


def train_rate(trainer: Trainer, seconds: float) -> float:
    begun, updates = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        trainer.update()
        updates += 1
    return updates * trainer._batch.num_tokens / (time.perf_counter() - begun)


def decode_rate(engine: NativeEngine, sequences: int, seconds: float, round: int) -> float:
    """Return tokens per second of this many sequences, after a start that is not measured."""
    requests = make_requests([LONGEST] * sequences, round)
    engine.expect_sync()
    engine.submit(requests)
    while len(engine._slots.live) < sequences:
        engine.step()
    begun, before = time.perf_counter(), engine.tokens_sampled
    while time.perf_counter() - begun < seconds:
        engine.step()
    rate = (engine.tokens_sampled - before) / (time.perf_counter() - begun)
    engine.abort([request.id for request in requests])
    engine.wait_idle()
    return rate


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=1.2)
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_overlap.json")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)  # as in a worker
    model = make_model("0.5B", torch.float32)
    trained = SingleDevice(model, TrainSettings(dtype="bfloat16", micro_batch_tokens=32768))
    trainer = Trainer(trained)
    engine = NativeEngine(
        model.config,
        trained.copied_weights(PROMPT + LONGEST),
        slots=SLOTS,
        max_length=PROMPT + LONGEST,
        kv_memory_fraction=0.4,
    )
    alone = {n: decode_rate(engine, n, options.seconds, 100 + n) for n in SEQUENCES}
    train_alone = train_rate(trainer, options.seconds)
    rows: list[dict[str, Any]] = []
    for limited in (False, True):
        if limited:
            trained.limit_launches()
        for n in SEQUENCES:
            with trainer:
                begun = time.perf_counter()
                decoded = decode_rate(engine, n, options.seconds, n)
            trained_rate = trainer.tokens / (time.perf_counter() - begun)
            rows.append(
                {
                    "limited": limited,
                    "sequences": n,
                    "train_tokens_per_s": round(trained_rate),
                    "decode_tokens_per_s": round(decoded),
                    "train_fraction": round(trained_rate / train_alone, 2),
                    "decode_fraction": round(decoded / alone[n], 2),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    result = gpu_circumstances() | {
        "triton": triton.__version__,
        "load": "0.5B, updates of 50 x 640 tokens",
        "train_alone_tokens_per_s": round(train_alone),
        "decode_alone_tokens_per_s": {n: round(rate) for n, rate in alone.items()},
        "together": rows,
    }
    write(options.out, result)


if __name__ == "__main__":
    main()
