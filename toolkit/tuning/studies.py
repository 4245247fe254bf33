"""An `EvaluationStore` in a database: evaluations as trials of Optuna studies.

There is one study for each setup (search, held out, ...), so that Optuna's dashboard shows them
during and after the search. The search does not read its trials from there: Optuna's samplers keep
their random state in memory, and the same seed must give the same bytes. No message shows the
password of a database's URL.
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
from toolkit.extras import install
from toolkit.files.tuning import Outcome
from toolkit.tuning.evaluate import Evaluation, Task
from toolkit.tuning.executor import evaluation_of

DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
USAGE = (
    "sqlite:///tuning.db, or postgresql://USER@HOST/DATABASE with the password in PGPASSWORD or "
    "~/.pgpass"
)
KEY = "llmctl_key"
OUTCOME = "llmctl_outcome"
RATIOS = "llmctl_ratios"
STOPPED = "llmctl_stopped_after"


class Studies:
    """An `EvaluationStore` in a database.

    Args:
        url: `sqlite:///FILE` or `postgresql://USER@HOST/DATABASE`; `InputError` if unusable.
        name: of the recipe that is tuned.
        fingerprint: digests and settings that decide the results. Each fingerprint has its own
            studies.
    """

    def __init__(self, url: str, name: str, fingerprint: str) -> None:
        self._url = _parse(url)
        self._prefix = f"llmctl {name} {hashlib.sha256(fingerprint.encode()).hexdigest()[:12]} "
        self._studies: dict[str, optuna.Study] = {}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with self._plain_errors():
            self._storage = optuna.storages.RDBStorage(
                self._url.render_as_string(hide_password=False),
                # Nothing tells when a search ends, so nothing could close a pool.
                engine_kwargs={"poolclass": NullPool},
            )
            labels = [
                name.removeprefix(self._prefix)
                for name in optuna.get_all_study_names(self._storage)
                if name.startswith(self._prefix)
            ]
            self.known = {
                key: evaluation
                for label in labels
                for key, evaluation in _evaluations(self._study(label))
            }

    def keep(self, key: str, task: Task, evaluation: Evaluation) -> None:
        """See `EvaluationStore.keep`. A task that ended early is a pruned trial.

        Raises `InputError` where the database is gone.
        """
        numbers, distributions = _numbers(evaluation.outcome)
        attributes: dict[str, object] = {
            KEY: key,
            OUTCOME: evaluation.outcome.model_dump(mode="json"),
            RATIOS: evaluation.ratios,
        }
        state = optuna.trial.TrialState.COMPLETE
        steps = {}
        windows = evaluation.stopped_after
        if windows is not None:
            attributes[STOPPED] = windows
            state = optuna.trial.TrialState.PRUNED
            steps = {windows: evaluation.score}
        trial = optuna.trial.create_trial(
            state=state,
            value=None if steps else evaluation.score,
            intermediate_values=steps,
            params=numbers,
            distributions=distributions,
            user_attrs=attributes,
        )
        with self._plain_errors():
            self._study(task.setup.label).add_trial(trial)

    def forget(self) -> None:
        """Do nothing: the studies stay, for the dashboard."""

    def _study(self, label: str) -> optuna.Study:
        if label not in self._studies:
            self._studies[label] = optuna.create_study(
                storage=self._storage,
                study_name=self._prefix + label,
                direction="maximize",
                load_if_exists=True,
            )
        return self._studies[label]

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Turn errors of the database's libraries into one line without the password."""
        shown = self._url.set(query={}).render_as_string(hide_password=True)
        try:
            yield
        except ImportError:
            raise InputError(
                f"storage {shown}: its driver is not installed", install("postgres")
            ) from None
        except (SQLAlchemyError, optuna.exceptions.OptunaError, RuntimeError) as error:
            lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise InputError(f"storage {shown}: {_masked(lines[0], self._url)}", USAGE) from None


def _parse(url: str) -> URL:
    """Parse the URL of a database. `InputError` omits a wrong URL: it may hold a password."""
    scheme = url.partition(":")[0]
    if scheme not in DRIVERS:
        raise InputError(
            f"--storage: '{scheme if '://' in url else '...'}' is not a database that can be used",
            USAGE,
        )
    try:
        return make_url(url).set(drivername=DRIVERS[scheme])
    except (SQLAlchemyError, ValueError):
        raise InputError("--storage: it is not a URL", USAGE) from None


def _masked(text: str, url: URL) -> str:
    """The text with asterisks for every spelling of the URL's password."""
    secrets = [
        str(url.password or ""),
        *(str(value) for key, value in url.query.items() if "pass" in key),
    ]
    for secret in filter(None, secrets):
        for spelling in {secret, quote(secret, safe=""), quote_plus(secret), unquote(secret)}:
            text = text.replace(spelling, "***")
    return text


def _numbers(outcome: Outcome) -> tuple[dict[str, float], dict[str, BaseDistribution]]:
    """The policy's numbers for Optuna's dashboard, each with a distribution of that one value."""
    numbers = {
        f"{outcome.policy}.{name}": value
        for name, value in outcome.parameters.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    ranges = {
        name: IntDistribution(value, value)
        if isinstance(value, int)
        else FloatDistribution(value, value)
        for name, value in numbers.items()
    }
    return numbers, ranges


def _evaluations(study: optuna.Study) -> Iterator[tuple[str, Evaluation]]:
    for trial in study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        if KEY in attributes:
            try:
                found = evaluation_of(*map(attributes.get, (OUTCOME, RATIOS, STOPPED)))
            except ValueError:
                raise InputError(
                    f"--storage: trial {trial.number} of study '{study.study_name}' is damaged",
                    "delete the study, or name another database",
                ) from None
            yield attributes[KEY], found
