"""The benchmark of operators: coefficients that it finds, and the file that ships."""

import json

import numpy as np
import pytest

from benchmarks.public.operators import Plain, as_json, kernel_of, solve, solve_unseen
from toolkit.estimators.gpu_operators import Kernel, measured_operators, reduce_s

REDUCE = kernel_of("start_s bytes_per_s")


def test_coefficients_are_found_again_and_written() -> None:
    sizes = np.array([1e3, 1e5, 1e7, 1e8])
    law = REDUCE(5e-6, 2e11)
    seconds = reduce_s(law, sizes)
    fitted = solve("x", REDUCE, lambda one: reduce_s(one, sizes), seconds, [1e-6, 1e11])
    assert fitted.value.terms == pytest.approx(law.terms)
    assert fitted.median < 0.1
    kept = {"engine": {"constants": {"kernel_s": 1e-6}}}
    written = json.loads(as_json({"h200_sxm": measured_operators()["h200_sxm"]}, kept))
    kernels = written["gpus"]["h200_sxm"]["kernels"]
    assert kernels["all_reduce"]["2"]["terms"]["bytes_per_s"] > 1e11
    assert written["engine"] == kept["engine"]
    assert kernels["latent_decode"]["fp8"]["factors"][0] == [4, 1.0]


def test_a_kernel_is_made_of_coefficients_in_their_order() -> None:
    assert REDUCE(1.0, 2.0) == Kernel({"start_s": 1.0, "bytes_per_s": 2.0})
    make = kernel_of("row_s", heads=(8, 16, 32))
    assert make(1.0, 3.0, 5.0) == Kernel({"row_s": 1.0}, factors=((8, 1.0), (16, 3.0), (32, 5.0)))


def test_errors_are_of_batches_that_the_fit_did_not_see() -> None:
    batch = np.repeat([1.0, 2.0, 4.0, 8.0], 2)
    sizes = batch * 1e6
    seconds = reduce_s(REDUCE(5e-6, 2e11), sizes)
    seconds[batch == 2] *= 2.0
    seconds[batch == 8] *= 2.0  # the others are seen
    found = solve_unseen(
        "x", REDUCE, lambda one: reduce_s(one, sizes), seconds, [1e-6, 1e11], batch
    )
    assert (found.median, found.p90) == pytest.approx((50.0, 50.0), abs=0.1)


def test_plain_kernels_start_later_with_more_tokens_up_to_some() -> None:
    law = Plain(start_s=1.0, power=0.5, token_s=0.25, head_s=0.125)
    tokens = np.array([4.0, 64.0, 256.0])
    assert law.seconds(tokens, 2 * np.ones(3)) == pytest.approx([2.0 + 2, 8.0 + 32, 8.0 + 128])
