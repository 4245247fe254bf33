"""vLLM as a system of bench/offline_throughput.py; run by the Python of an environment that has it.

    VLLM-PYTHON bench/offline_vllm.py FOLDER

In one process, eager, float32, without prefix caching, with as many blocks of KV cache as the work
allows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offline_child import Outputs, Serve, answer
from vllm_alone import ENVIRONMENT, bind

BLOCK = 32  # tokens
ROWS = 128


def load() -> tuple[Mapping[str, Any], Serve]:
    folder = Path(sys.argv[1])
    work = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    os.environ |= ENVIRONMENT | bind(work["threads"])
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    model = LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=ROWS,
        block_size=BLOCK,
        num_gpu_blocks_override=work["kv_tokens"] // BLOCK + 1,  # one is never given out
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

    return {"version": vllm.__version__, "block_size": BLOCK, "max_num_seqs": ROWS}, serve


if __name__ == "__main__":
    answer(load)
