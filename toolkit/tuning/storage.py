"""Evaluations kept in a database, as trials of Optuna studies: `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`.

A search has one study for each bench (search, held out, ...), so that Optuna's dashboard shows its trials while it runs
and afterwards. The search itself does not read trials from it: Optuna's samplers keep their random state in memory, and
the same seed shall give the same bytes. An interrupted search finds its evaluations again, as from a file.
No password of a URL is shown, whatever happens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, quote_plus, unquote

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from toolkit.errors import InputError
from toolkit.files.tuning import Outcome
from toolkit.tuning.evaluate import Evaluation, Task

DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
USAGE = "sqlite:///tuning.db, or postgresql://USER@HOST/DATABASE with the password in PGPASSWORD or ~/.pgpass"
KEY, OUTCOME, RATIOS = "llmctl_key", "llmctl_outcome", "llmctl_ratios"


class Studies:
    """`toolkit.tuning.memo.Memory` in a database.

    Args:
        url: the database's. `InputError` for one that cannot be used.
        name: of what is tuned.
        fingerprint: digests and settings that decide the results; another one has studies of its own.
    """

    def __init__(self, url: str, name: str, fingerprint: str) -> None:
        self._url = _parse(url)
        self._prefix = f"llmctl {name} {hashlib.sha256(fingerprint.encode()).hexdigest()[:12]} "
        self._studies: dict[str, optuna.Study] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with self._plainly():
            self._storage = optuna.storages.RDBStorage(
                self._url.render_as_string(hide_password=False),
                engine_kwargs={"poolclass": NullPool},  # a search has no end at which a pool would be closed
            )
            self.known = {key: evaluation for study in self._left() for key, evaluation in _evaluations(study)}

    def keep(self, key: str, task: Task, evaluation: Evaluation) -> None:
        """See `Memory.keep`. `InputError` where the database is gone."""
        numbers, distributions = _numbers(evaluation.outcome)
        attributes = {KEY: key, OUTCOME: evaluation.outcome.model_dump(mode="json"), RATIOS: evaluation.ratios}
        trial = optuna.trial.create_trial(
            value=evaluation.score, params=numbers, distributions=distributions, user_attrs=attributes
        )
        with self._plainly():
            self._study(task.bench.label).add_trial(trial)

    def forget(self) -> None:
        """Nothing: the studies are there to be looked at."""

    def _study(self, label: str) -> optuna.Study:
        if label not in self._studies:
            self._studies[label] = optuna.create_study(
                storage=self._storage, study_name=self._prefix + label, direction="maximize", load_if_exists=True
            )
        return self._studies[label]

    def _left(self) -> Iterator[optuna.Study]:
        """The studies of an earlier run."""
        for name in optuna.get_all_study_names(self._storage):
            if name.startswith(self._prefix):
                yield self._study(name.removeprefix(self._prefix))

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """What a database's libraries raise, in one line and without the password."""
        shown = self._url.set(query={}).render_as_string(hide_password=True)
        try:
            yield
        except ImportError:
            raise InputError(
                f"storage {shown}: its driver is not installed", "pip install 'llmctl[postgres]'"
            ) from None
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            said = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise InputError(f"storage {shown}: {_masked(said[0], self._url)}", USAGE) from None


def _parse(url: str) -> URL:
    """`InputError` for what is no URL of a database that we know; it is not repeated, as it may hold a password."""
    scheme = url.partition(":")[0]
    if scheme not in DRIVERS:
        raise InputError(f"--storage: '{scheme if '://' in url else '...'}' is not a database that can be used", USAGE)
    try:
        return make_url(url).set(drivername=DRIVERS[scheme])
    except (SQLAlchemyError, ValueError):
        raise InputError("--storage: it is not a URL", USAGE) from None


def _masked(text: str, url: URL) -> str:
    secrets = [str(url.password or ""), *(str(value) for key, value in url.query.items() if "pass" in key)]
    for secret in filter(None, secrets):
        for spelling in {secret, quote(secret, safe=""), quote_plus(secret), unquote(secret)}:
            text = text.replace(spelling, "***")
    return text


def _numbers(outcome: Outcome) -> tuple[dict[str, float], dict[str, BaseDistribution]]:
    """The policy's numbers, as Optuna's dashboard plots them; each lies in a range of its own."""
    numbers = {
        f"{outcome.policy}.{name}": value
        for name, value in outcome.parameters.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    ranges = {
        name: IntDistribution(value, value) if isinstance(value, int) else FloatDistribution(value, value)
        for name, value in numbers.items()
    }
    return numbers, ranges


def _evaluations(study: optuna.Study) -> Iterator[tuple[str, Evaluation]]:
    for trial in study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        if KEY in attributes:
            yield attributes[KEY], Evaluation(Outcome(**attributes[OUTCOME]), attributes[RATIOS])
