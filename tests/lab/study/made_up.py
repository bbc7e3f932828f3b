"""Studies without training: workers that answer at once, and records of runs that never were."""

from unsoft.lab.study.record import Record
from unsoft.lab.study.worker import DONE

STEPS = 8


def result(job, score, validation=None, **more):
    """What a worker sends back for a run that got this score."""
    validation = score if validation is None else validation
    history = [{"step": STEPS, "eval_score": validation}, {"step": STEPS, "loss": 1.0}]
    found = {
        "score": score,
        "validation": validation,
        "metric": "accuracy",
        "higher_is_better": True,
        "chance": 0.25,
        "known": 1.0,
        "shortcut": None,
        "parameters": 99,
        "steps": STEPS,
        "seconds": 4.0,
        "difficulty": "length",
        "score_by": [{"value": 6, "score": score / 2, "validation": validation / 2}],
        "attention": {"first_token": [0.5]},
        "further": {},
        "figures": {},
        "learned": {},
        "versions": {"unsoft": "0"},
        "history": history,
    }
    return {"status": DONE, "result": found | more, "machine": "made up", "wall": 5.0}


class MadeUpWorkers:
    """Answers every run with what ``answer`` makes of its job; ``stop_after`` runs, a signal comes."""

    slots = 2

    def __init__(self, answer):
        self.answer, self.waiting, self.jobs, self.closed = answer, [], [], False

    def free(self):
        return self.slots - len(self.waiting)

    def submit(self, key, job):
        self.waiting.append((key, job))
        self.jobs.append(job)

    def wait(self, seconds):
        key, job = self.waiting.pop(0)
        return [(key, self.answer(job))]

    def stop(self):
        self.answer = lambda job: {"status": "cut", "wall": 1.0}

    def close(self, *, at_once=False):
        self.closed = True


def runs(mechanism, scores, *, validation=None, lr=0.1, group="g", study="s", status="done", **more):
    """A finished record for each score; seeds count from 0."""
    more = {"metric": "accuracy"} | more
    return [
        Record(
            study=study,
            group=group,
            task="copy",
            mechanism=mechanism,
            key=f"{mechanism} {lr} {seed}",
            seed=seed,
            lr=lr,
            point=f"lr={lr:g}",
            status=status,
            score=score,
            validation=score if validation is None else validation,
            **more,
        )
        for seed, score in enumerate(scores)
    ]
