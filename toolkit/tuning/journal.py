"""The evaluations of an interrupted search, kept beside the result by Optuna's JournalStorage.

The search does not read its trials from there: Optuna's samplers keep their random state in memory,
and the same seed must give the same bytes. So a search that goes on takes the same steps, and finds
their evaluations here.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from toolkit.errors import InputError
from toolkit.files.tuning import Evaluation
from toolkit.tuning.evaluate import score

FIRST = b'{"op_code"'  # how a journal of Optuna's begins
KEY = "key"  # an attribute of a trial, as is `EVALUATION`
EVALUATION = "evaluation"


class EvaluationJournal:
    """A file of Optuna's beside the result, with a trial for each evaluation.

    Args:
        path: the file, removed when the result is written.
        fingerprint: digests and settings that decide the results. Another one replaces the file.

    Attributes:
        known: what an earlier run of the same search left, by the keys of the tasks.

    Raises `InputError` if the file is damaged, except for a last line that a kill tore.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        name = hashlib.sha256(fingerprint.encode()).hexdigest()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            if path.exists():
                _mend(path)
            storage = _storage(path)
            if optuna.get_all_study_names(storage) == [name]:
                self._study = optuna.load_study(study_name=name, storage=storage)
            else:
                path.unlink()
                self._study = optuna.create_study(study_name=name, storage=_storage(path))
            trials = self._study.get_trials(deepcopy=False)
            self.known = dict(_evaluation_of(trial.user_attrs) for trial in trials)
        except OSError as error:
            raise InputError(f"{path}: cannot be used: {error.strerror}") from None
        except Exception:  # noqa: BLE001  (whatever Optuna raises for another file)
            raise InputError(
                f"{path.name}: it is damaged, or no journal of tune",
                "move it away; tune then begins anew",
            ) from None

    def keep(self, key: str, evaluation: Evaluation) -> None:
        """Keep an evaluation; return only when a kill would not lose it."""
        attributes = {KEY: key, EVALUATION: evaluation.model_dump(mode="json")}
        trial = optuna.trial.create_trial(value=score(evaluation), user_attrs=attributes)
        self._study.add_trial(trial)

    def forget(self) -> None:
        """Remove the file: the result is written."""
        self._path.unlink(missing_ok=True)


def _storage(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path)))


def _mend(path: Path) -> None:
    """Remove what a kill may leave: Optuna's lock, and a torn last line, which the next one would
    follow. Raises `ValueError` for a file that is no journal.
    """
    written = path.read_bytes()
    if written[: len(FIRST)] != FIRST[: len(written)]:
        raise ValueError("a file of something else, which stays as it is")
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    os.truncate(path, written.rfind(b"\n") + 1)


def _evaluation_of(attributes: dict[str, object]) -> tuple[str, Evaluation]:
    """Return a kept evaluation and the key of its task. Raises `ValueError` for damaged data."""
    evaluation = Evaluation.model_validate(attributes.get(EVALUATION))
    if "goodput_rps" not in evaluation.metrics:
        raise ValueError("an evaluation without goodput_rps")
    return str(attributes[KEY]), evaluation
