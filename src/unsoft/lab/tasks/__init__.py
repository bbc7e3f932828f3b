"""Synthetic tasks with a known answer, on which mechanisms differ; ``unsoft tasks`` lists them.

>>> import unsoft
>>> task = unsoft.lab.tasks.task("deletion")
>>> batch = task.sample(4, seed=1)
>>> task.score(task.solve(batch.inputs), batch.labels)
1.0
"""

from unsoft.lab.tasks.task import IGNORE, Batch, Setup, Task, register, task, tasks

__all__ = ["IGNORE", "Batch", "Setup", "Task", "register", "task", "tasks"]
