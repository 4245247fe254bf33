"""The flags that are rendered for vLLM, held against its own parser: VLLM_PYTHON=VENV/bin/python
pytest this file.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

import orders
import pytest
import samples

from toolkit.deploy.render import render_target
from toolkit.files.tuning import Settings

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parsed = vars(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
plain = (int, float, str)
print(json.dumps({key: value for key, value in parsed.items() if isinstance(value, plain)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "VLLM_PYTHON" not in os.environ, reason="needs VLLM_PYTHON, a Python that has vLLM 0.32"
)
def test_vllm_reads_every_flag(tmp_path: Path) -> None:
    fit = samples.fit(workers=1)
    server = {"engine": {"name": "openai", "url": "http://127.0.0.1:8000"}, "workers": 1}
    plan = orders.plan(
        tmp_path, Settings(policy="mlfq", parameters={}), fit, **(orders.GPU | server)
    )
    script = render_target("vllm", orders.order(plan))["serve.sh"]
    flags = script.partition("flags=(")[2].partition("\n)\n")[0]
    words = [plan.recipe.model.source, *shlex.split(flags, comments=True)]
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], "-c", PARSE, *words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert parsed["model_tag"] == "org/model"
    assert (parsed["max_model_len"], parsed["shutdown_timeout"]) == (512, 90)
    assert parsed["max_num_queued_tokens"] > 0
    assert parsed["scheduler_cls"] == "toolkit.backends.vllm.scheduler.LlmctlScheduler"
    assert parsed["async_scheduling"] is False
