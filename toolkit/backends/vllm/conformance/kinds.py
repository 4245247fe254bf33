"""The kinds of caches and servers that `llmctl vllm-check` compares.

The workloads of a new kind are made by `benchmarks.engines.workloads`; its row is here.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.backends.vllm.touched import Need


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A kind of workload, which is a row of the result.

    Attributes:
        name: of its workloads (`kind` of a case).
        classes: of `toolkit.catalogue.classes` that it stands for; none: full attention.
        needs: what of vLLM it touches.
        since: the first release that has it; '': all have.
        cited: verdicts about models of these classes cite it; not one of a setting of its own.
    """

    name: str
    classes: tuple[str, ...] = ()
    needs: Need = "simulation"
    since: str = ""
    cited: bool = True


KINDS = (
    ModelKind("full attention"),  # also MLA, and mixtures of experts
    ModelKind("prefill interval", since="0.33", cited=False),
    ModelKind("drafts by ngram", ("drafts",)),
    ModelKind("drafts by eagle", ("drafts",)),  # also MTP of one module
    ModelKind("live settings", since="0.31", cited=False),
    ModelKind("windows", ("windows",)),
    ModelKind("window only", ("window only",)),
    ModelKind("block sizes", ("windows", "block sizes")),
    ModelKind("states", ("states",)),
    ModelKind("drafts and groups", ("windows", "drafts")),
    ModelKind("thresholds and groups", cited=False),
    ModelKind("live settings and groups", since="0.31", cited=False),
    ModelKind("live settings and drafts", ("drafts",), since="0.31", cited=False),
    ModelKind("live settings and eagle", ("drafts",), since="0.31", cited=False),
    ModelKind("our policies inside", needs="inside", cited=False),
)
