"""The benchmark of operators: coefficients that it finds, and the file that ships."""

import json

import numpy as np
import pytest

from benchmarks.public.operators import as_json, solve
from toolkit.estimators.gpu_operators import AllReduce, measured_operators


def test_coefficients_are_found_again_and_written() -> None:
    sizes = np.array([1e3, 1e5, 1e7, 1e8])
    law = AllReduce(5e-6, 2e11)
    fitted = solve("x", AllReduce, lambda one: one.seconds(sizes), law.seconds(sizes), [1e-6, 1e11])
    assert (fitted.value.start_s, fitted.value.bytes_per_s) == pytest.approx((5e-6, 2e11))
    assert fitted.median < 0.1
    kept = {"engine": {"constants": {"kernel_s": 1e-6}}}
    written = json.loads(as_json({"h200_sxm": measured_operators("h200_sxm")}, kept))
    assert written["gpus"]["h200_sxm"]["all_reduce"]["2"]["bytes_per_s"] > 1e11
    assert written["engine"] == kept["engine"]
