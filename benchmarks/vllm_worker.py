"""vLLM on CPU, driven by engine.py over pipes: one JSON line in per run, one JSON line out.

Runs in vLLM's interpreter (see install_vllm.sh), so it imports nothing from Paceline. It is
configured for speed: in-process, eager (compiling takes half a minute and helps only at 16
sequences), no statistics, no detokenization, no prefix cache (all prompts differ). Log-probs of the
sampled token are on.
"""

import json
import os
import sys
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["TORCHDYNAMO_DISABLE"] = "1"


def main(model: str, max_length: int, max_sequences: int) -> None:
    # vLLM prints to stdout, so keep the original stdout for the replies
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import vllm

    engine = vllm.LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        max_model_len=max_length,
        max_num_seqs=max_sequences,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )
    print(
        json.dumps(
            {
                "vllm": vllm.__version__,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
            }
        ),
        file=replies,
        flush=True,
    )
    for line in sys.stdin:
        job = json.loads(line)
        sampling = [
            vllm.SamplingParams(
                max_tokens=new,
                temperature=1.0,
                logprobs=0,
                seed=seed,
                ignore_eos=True,
                detokenize=False,
            )
            for seed, new in enumerate(job["lengths"])
        ]
        began = time.perf_counter()
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False
        )
        seconds = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
