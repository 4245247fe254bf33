"""Evaluations in Optuna's journal beside the result, reused after an interruption."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import optuna
import pytest
import samples
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from test_tuning import trace

from toolkit.errors import InputError
from toolkit.files.tuning import Evaluation
from toolkit.tuning.evaluate import Task, score
from toolkit.tuning.executor import InProcessRunner, Remembering, assembled, collect, pieces_of
from toolkit.tuning.journal import EvaluationJournal


class Interrupted(InProcessRunner):
    """Is interrupted after so many evaluations."""

    def __init__(self, left: int) -> None:
        self.left = left

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for index, evaluation in super().run(tasks):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            yield index, evaluation


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.json.partial"


def tasks(count: int = 4) -> list[Task]:
    own = samples.task(trace(50), label="search, 2 workers")
    return [
        own.under(samples.chosen("slice", slice_tokens=8 * k, max_min=bool(k % 2)))
        for k in range(1, count + 1)
    ]


def keep(path: Path, count: int) -> None:
    """An interrupted run that kept so many evaluations."""
    with pytest.raises(KeyboardInterrupt):
        collect(Remembering(Interrupted(count), EvaluationJournal(path, "one")), tasks())


def test_kept_evaluations_are_reused_and_give_the_same_result(path: Path) -> None:
    keep(path, 2)
    again = Remembering(InProcessRunner(), EvaluationJournal(path, "one"))
    assert again.remembered == 2
    assert collect(again, tasks()) == collect(InProcessRunner(), tasks())
    everything = Remembering(Interrupted(0), EvaluationJournal(path, "one"))
    assert collect(everything, tasks()) == collect(InProcessRunner(), tasks())
    assert Remembering(InProcessRunner(), EvaluationJournal(path, "two")).remembered == 0


def test_it_is_one_file_which_optuna_can_load(path: Path) -> None:
    keep(path, 2)
    assert list(path.parent.iterdir()) == [path]
    storage = JournalStorage(JournalFileBackend(str(path)))
    [name] = optuna.get_all_study_names(storage)
    trials = optuna.load_study(study_name=name, storage=storage).trials
    assert [trial.value for trial in trials] == [
        score(one) for one in collect(InProcessRunner(), tasks(2))
    ]
    EvaluationJournal(path, "one").forget()
    assert list(path.parent.iterdir()) == []


DAMAGED = [
    b"\x00" * 64,
    b"\xff\xfe no UTF-8",
    b"[" * 100_000,
    b"[1]",
    b"",
    b'{"key":"slice/7","result":{"seconds":[1.0]}}',  # of profile's journal
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_line_is_said_in_one_line_and_kept(damaged: bytes, path: Path) -> None:
    keep(path, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    for place in (0, 2):
        content = b"".join([*lines[:place], damaged + b"\n", *lines[place:]])
        path.write_bytes(content)
        with pytest.raises(InputError, match=path.name):
            EvaluationJournal(path, "one")
        assert path.read_bytes() == content


@pytest.mark.parametrize("damaged", [{"settings": 5}, [1], "x"])
def test_a_damaged_evaluation_is_said_in_one_line(damaged: object, path: Path) -> None:
    keep(path, 1)
    storage = JournalStorage(JournalFileBackend(str(path)))
    [name] = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    kept = study.trials[0].user_attrs
    study.add_trial(
        optuna.trial.create_trial(value=1.0, user_attrs={**kept, "evaluation": damaged})
    )
    with pytest.raises(InputError, match=path.name):
        EvaluationJournal(path, "one")


def test_a_line_that_a_kill_has_torn_is_dropped(path: Path) -> None:
    keep(path, 2)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole + last[:30])
    assert len(EvaluationJournal(path, "one").known) == 2
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-30])
    assert len(EvaluationJournal(path, "one").known) == 1
    path.write_bytes(b'{"op')
    assert EvaluationJournal(path, "one").known == {}


@pytest.mark.parametrize("content", [b"notes, without a line's end", b"a line\nand a half"])
def test_another_file_of_that_name_is_refused_and_stays_as_it_is(
    content: bytes, path: Path
) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"tuning\.json\.partial"):
        EvaluationJournal(path, "one")
    assert path.read_bytes() == content


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_the_order_in_which_windows_are_done_changes_nothing(order: list[int]) -> None:
    task = samples.task(trace(40), trace(50), trace(60))
    pieces = list(pieces_of([task]))
    results = [(pieces[number], pieces[number].task.simulate(0)) for number in order]
    assert list(assembled([task], results)) == [(0, task.run())]
