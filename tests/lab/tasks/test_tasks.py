"""The contract of every task: the same data from the same seed, exact answers,
a chance level and a known solution that are true."""

import importlib.util
import math
from dataclasses import replace

import pytest
import torch

import unsoft
from tests.lab.tasks.brute_force import SOLVERS
from unsoft.lab.records import PACKAGED
from unsoft.lab.study import read_records
from unsoft.lab.tasks import IGNORE, Task, task, tasks
from unsoft.lab.tasks.corpus import corpus
from unsoft.lab.tasks.draw import generator
from unsoft.lab.training.run import references
from unsoft.lab.training.trainer import evaluation_batches

NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "digits" and importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn"
        ),
    )
    for name in tasks()
    if name != "language"  # its corpus is large: tests/lab/tasks/test_language.py has a small one
]
FORMS = [  # every task, and the forms that a knob chooses
    *((name, {}) for name in SOLVERS),
    ("recall", {"form": "joined", "keys": 16, "values": 8}),
    ("deletion", {"form": "stream"}),
    ("deletion", {"others": 0, "shared": 0}),
    ("in-context-recall", {"length": 4}),
    ("fuzzy-recall", {"longest": 3, "keys": 5}),
    ("noisy-recall", {"noise": 0.9}),
    ("selective-copy", {"length": 13}),
]
ANSWERS = 20_000


def test_every_task_of_the_issue_is_there():
    assert set(tasks()) >= {*SOLVERS, "memorisation", "text", "digits"}


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_examples_and_another_one_others(name):
    made = task(name)
    for training in (True, False):
        first, again = (made.sample(8, seed=3, index=5, training=training) for _ in range(2))
        assert torch.equal(first.inputs, again.inputs) and torch.equal(first.labels, again.labels)
    one = made.sample(32, seed=3).inputs
    for other in (made.sample(32, seed=4), made.sample(32, seed=3, index=1)):
        assert one.shape == other.inputs.shape and not torch.equal(one, other.inputs)
    state = torch.random.get_rng_state()
    made.sample(2)
    assert torch.equal(state, torch.random.get_rng_state())  # torch's own generator is left alone


@pytest.mark.parametrize("name", NAMES)
def test_inputs_and_labels_are_what_the_task_says(name):
    made = task(name)
    for training in (True, False):
        inputs, labels = made.sample(16, training=training)
        if made.kind == "tokens":
            assert inputs.dtype == torch.int64 and inputs.min() >= 0 and inputs.max() < made.size
        elif made.kind == "features":
            assert inputs.shape[-1] == made.size and inputs.isfinite().all()
        else:
            assert inputs.shape[-2:] == (made.size, made.size)
        there = labels[labels != IGNORE]
        assert (labels != IGNORE).flatten(1).any(1).all() if labels.dim() > 1 else len(there) == 16
        if made.metric == "accuracy":
            assert set(there.tolist()) <= set(made.choices) if len(made.choices) < made.outputs else True
            assert there.min() >= 0 and there.max() < made.outputs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "knobs"), FORMS)
def test_labels_are_what_brute_force_finds(name, knobs, training):
    made = task(name, **knobs)
    for index in range(3):
        inputs, labels = made.sample(8, seed=1, index=index, training=training)
        for row, answers in zip(inputs.tolist(), labels, strict=True):
            expected = torch.full_like(answers, IGNORE)
            solved = SOLVERS[name](made, row)
            for position, answer in solved.items():
                expected[position] = torch.tensor(answer)
            if name == "recall":  # a random token that fills the stream may be a key, which is not asked
                expected = torch.where(answers == IGNORE, IGNORE, expected)
                assert (answers != IGNORE).sum() == made.pairs
            assert torch.allclose(expected, answers, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_chance_is_what_a_guesser_gets(name):
    made = task(name)
    grades = []
    for index in range(200):
        labels = made.sample(64, seed=7, index=index).labels
        grades.append(made.grade(made.guess(labels, generator(index, "guess")), labels))
        if sum(map(len, grades)) > ANSWERS:
            break
    scores = torch.cat(grades)
    error = (
        4 * scores.std().item() / len(scores) ** 0.5
    )  # answers within a sequence hardly depend on each other
    assert abs(scores.mean().item() - made.chance) <= error + 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_the_known_solution_is_known(name):
    made = task(name)
    best = 0.0 if made.metric == "relative error" else 1.0
    if name == "digits":
        assert 0.97 < made.known() < 1
    elif name == "text":
        assert 2 < made.known() < 3.5
    else:
        assert made.known() == pytest.approx(best, abs=1e-6 if best == 0 else 0.005)
    assert not made.sweep() or made in made.sweep()
    assert sorted(made.difficulties()) == list(made.difficulties())
    for other in made.sweep():
        assert type(other) is type(made)
        assert other.known(8) == pytest.approx(made.known(8), abs=0.5 if name == "text" else 0.04)


def test_shortcuts_lose_what_they_cannot_see():
    counting = task("census").shortcut_score(2000)
    assert 0.7 < counting < 0.85
    assert task("census", repeats=1).shortcut_score() == 1.0  # nothing is repeated
    assert task("opposition").shortcut_score(2000) == pytest.approx(2 / 3, abs=0.04)
    assert task("deletion").shortcut_score(4000) == pytest.approx(1 / 4, abs=0.03)
    assert task("copy").shortcut_score() is None


def test_longer_and_harder_is_what_the_knobs_say():
    assert task("census", repeats=3).sample(2).inputs.shape[1] == 2 + 10
    assert task("needle", crowd=7, distractors=0).sample(2).inputs.shape[1] == 9
    assert task("focus", length=70).sample(2).inputs.shape[1] == 70
    assert task("recall", length=100).sample(2).inputs.shape[1] == 100
    assert task("copy", length=9).sample(2).inputs.shape[1] == 18
    assert task("deletion", form="stream", length=20).sample(2).inputs.shape[1] == 20
    assert task("text", length=33).sample(2).inputs.shape == (2, 33)
    lengths = {
        task("copy", length=9).sample(2, index=index, training=True).inputs.shape[1] for index in range(60)
    }
    assert lengths == {2 * n for n in range(1, 10)}


def test_similarity_and_noise_are_what_the_knobs_say():
    made = task("needle", similarity=0.7, noise=0.0, distractors=0, crowd=5)
    inputs, _ = made.sample(4)
    where = torch.nn.functional.normalize(inputs[..., : made.dim], dim=-1)
    cosines = (where[:, :-1] @ where[:, -1:].mT).squeeze(-1).sort(-1).values
    assert torch.allclose(cosines, torch.tensor([0.7] * 5 + [1.0]).expand(4, -1), atol=1e-5)
    assert task("needle", noise=1.5).known() < 0.9
    assert task("focus", noise=1.0).known() < 0.9


def test_a_trigger_alone_is_not_at_rest():
    made = task("trigger", length=5)
    inputs, labels = made.sample(8, seed=1)
    rests = made.at_rest(labels)
    marks = inputs[..., made.dim :]
    assert rests.tolist() == (marks[..., 2] > 0).tolist() and rests.sum(1).tolist() == [4] * 8
    assert task("census").at_rest(labels) is None


def test_the_power_law_of_recall():
    """Place number i is asked in proportion to i ** (power - 1), as in zoology."""
    for power in (0.01, 1.0):
        made = task("recall", pairs=1, length=2 + 2 * 24, power=power)
        labels = torch.cat([made.sample(512, index=index).labels for index in range(4)])
        expected = torch.arange(1.0, 25) ** (power - 1)
        expected /= expected.sum()
        shares = (labels[:, 2::2] != IGNORE).float().mean(0)
        assert ((shares - expected).abs() <= 4 * (expected * (1 - expected) / len(labels)).sqrt()).all()


def test_facts_stay_and_sequences_change():
    made = task("memorisation")
    known = {}
    for training in (True, False):
        inputs, labels = made.sample(64, seed=int(training), training=training)
        for key, value in zip(
            inputs[:, 0::2].flatten().tolist(), labels[:, 1::2].flatten().tolist(), strict=True
        ):
            assert known.setdefault(key, value) == value
    assert len(known) == made.keys
    other = replace(made, facts=1)
    assert other.score(made.solve(other.sample(8).inputs), other.sample(8).labels) < 0.1


def test_scores_are_means_of_grades():
    made = task("copy", length=2, vocabulary=3)
    labels = torch.tensor([[IGNORE, 0, 1, 2]])
    outputs = torch.tensor([[[9.0, 0, 0], [9, 0, 0], [0, 9, 0], [0, 9, 0]]])
    assert made.score(outputs, labels) == pytest.approx(2 / 3)
    expected = (2 * math.log(1 + 2 * math.exp(-9)) + 9 + math.log(1 + 2 * math.exp(-9))) / 3
    assert made.loss(outputs, labels).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "knobs", "problem"),
    [
        ("census", {"sources": 4}, "must be odd"),
        ("census", {"repeats": 0}, "at least 1"),
        ("recall", {"pairs": 6}, "length of at least 24, not 16"),
        ("recall", {"pairs": 9, "keys": 8}, "as many keys"),
        ("recall", {"form": "joint"}, "must be 'stream' or 'joined', not 'joint'"),
        ("recall", {"length": 17}, "even"),
        ("induction", {"length": 200}, "vocabulary"),
        ("induction", {"questions": 8}, "at most 7 questions"),
        ("focus", {"length": 10}, "at least 64, not 10"),
        ("selective-copy", {"length": 8}, "at least 9, not 8"),
        ("fuzzy-recall", {"words": 99}, "fewer than 99"),
        ("deletion", {"shared": 15}, "at most 14"),
        ("deletion", {"form": "stream", "length": 4}, "at least 5"),
        ("text", {"length": 10**9}, "bytes of the training text"),
        ("text", {"path": "/no/such/file"}, "cannot be read"),
        ("digits", {"patch": 3}, "divide"),
        ("needle", {"noise": 3}, "from 0 to 2"),
        ("needle", {"noise": math.nan}, "'noise' must be a finite number"),
        ("copy", {"lenght": 3}, "there are length, vocabulary"),
        ("cpoy", {}, "did you mean 'copy'"),
    ],
)
def test_knobs_that_do_not_fit_are_named(name, knobs, problem):
    with pytest.raises(ValueError, match=problem):
        task(name, **knobs)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="'length' must be a whole number .*, not '8'"):
        task("copy", length="8")
    with pytest.raises(TypeError, match="'noise' must be a number"):
        task("focus", noise="much")
    with pytest.raises(ValueError, match="'count' must be at least 1"):
        task("copy").sample(0)


def test_text_is_split_by_document(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"<{number}>" * 20)

    def documents(**options):
        texts = [bytes(part.tolist()).decode() for part in corpus(str(tmp_path), **options)]
        return [{number for number in range(60) if f"<{number}>" in text} for text in texts]

    train, test = documents()
    assert not train & test and train | test == set(range(60)) and len(test) > 1
    rest, validation, same = documents(validation=True)
    assert same == test and rest | validation == train and not rest & validation and len(validation) > 1
    single = tmp_path / "one.txt"
    single.write_bytes(b"a" * 90 + b"b" * 10)
    train, test = corpus(str(single))
    assert (train == ord("a")).all() and (test == ord("b")).all() and len(test) == 10
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        task("text", path=str(tmp_path / "empty.txt"))


def test_windows_of_training_validation_and_test_never_overlap(tmp_path):
    """In a small file of numbered lines, so that each tells where it is from."""
    (tmp_path / "lines.txt").write_text("".join(f"{number:05}\n" for number in range(3000)))
    made = task("text", path=str(tmp_path / "lines.txt"), length=64)

    def lines(batch):
        rows = torch.cat([batch.inputs, batch.labels[:, -1:]], 1).tolist()
        return {line for row in rows for line in bytes(row).decode().split("\n")[1:-1]}

    parts = [lines(made.sample(256, **which)) for which in ({"training": True}, {"validation": True}, {})]
    assert all(len(part) > 100 for part in parts)
    assert max(parts[0]) < min(parts[1]) <= max(parts[1]) < min(parts[2])
    with pytest.raises(ValueError, match=r"less than the \d+ bytes of the validation text, not 1800"):
        task("text", path=str(tmp_path / "lines.txt"), length=1800)


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn")
def test_pictures_of_training_validation_and_test_never_overlap():
    made = task("digits")
    kinds = ({"training": True}, {"validation": True}, {})
    training, validation, test = (
        {picture.numpy().tobytes() for picture in made.sample(8192, **kind).inputs} for kind in kinds
    )
    assert not training & validation and not training & test and not validation & test
    assert len(training) > len(test) > len(validation) > 150  # nearly all pictures of each part were drawn


def test_default_text_has_documentation_and_sources():
    train, test = corpus()
    assert len(train) > 10 * len(test) / 2 > 100_000
    assert b"import " in bytes(test.tolist())


def test_a_task_of_ones_own_registers_the_same_way():
    from dataclasses import dataclass

    with pytest.raises(TypeError, match="expected a class of unsoft.lab.tasks.Task"):
        unsoft.lab.tasks.register(object)
    with pytest.raises(ValueError, match="has no 'tells'"):
        unsoft.lab.tasks.register(type("Nameless", (Task,), {"name": "nameless"}))

    @dataclass(frozen=True, kw_only=True)
    class Unknown(type(task("copy"))):
        name = "unknown"
        pace: int

    with pytest.raises(TypeError, match="the knob 'pace' of Unknown needs a default"):
        unsoft.lab.tasks.register(Unknown)

    @dataclass(frozen=True, kw_only=True)
    class Second(type(task("copy"))):
        name = "copy"

    with pytest.raises(ValueError, match="'copy' exists already"):
        unsoft.lab.tasks.register(Second)


def test_known_and_shortcut_are_scored_on_the_examples_of_the_test():
    """The shortcut of census counts copies; its score is the one that recorded runs quote."""
    records = [record for record in read_records(PACKAGED) if record.study == "census"]
    assert references(evaluation_batches(task("census"), width=0)) == (
        1.0,
        pytest.approx(records[0].shortcut),
    )
