"""vLLM as a system of `offline_throughput`, run by the Python of an environment that has it.

    VLLM-PYTHON -m benchmarks.engines.offline_vllm FOLDER

Started by `offline_throughput`. One process, eager, float32, without prefix caching, with as many
blocks of KV cache as the work allows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.common.command import read_words
from benchmarks.engines.offline_child import Outputs, Serve, answer
from benchmarks.engines.vllm_alone import ENVIRONMENT, bind

BLOCK = 32  # tokens
ROWS = 128


def load() -> Serve:
    folder = Path(*read_words(__doc__, "FOLDER"))
    work = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    os.environ |= ENVIRONMENT | bind(work["threads"])
    from vllm import LLM, SamplingParams, TokensPrompt

    model = LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=ROWS,
        block_size=BLOCK,
        num_gpu_blocks_override=work["kv_tokens"] // BLOCK + 1,  # vLLM never uses one of them
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in work["prompts"]]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in work["outputs"]
    ]

    def serve(count: int) -> Outputs:
        found = model.generate(prompts[:count], sampling[:count], use_tqdm=False)
        return {index: one.outputs[0].token_ids for index, one in enumerate(found)}

    return serve


if __name__ == "__main__":
    answer(load)
