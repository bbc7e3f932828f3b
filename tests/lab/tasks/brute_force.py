"""Every task solved again, one example at a time and in plain Python:
from the inputs alone to {position: answer}."""

import math
from collections import Counter


def cosine(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True)) / math.hypot(*x) / math.hypot(*y)


def said(task, item):
    label = item[task.dim : task.dim + getattr(task, "labels", 2)]
    return label.index(max(label))


def nearest(task, items, asked):
    return max(items, key=lambda item: cosine(item[: task.dim], asked[: task.dim]))


def census(task, row):
    sources = []  # one item of each
    for item in row[1:-1]:
        if all(cosine(item[: task.dim], other[: task.dim]) < 0.8 for other in sources):
            sources.append(item)
    assert len(sources) == task.sources
    return {len(row) - 1: Counter(said(task, item) for item in sources).most_common(1)[0][0]}


def recall(task, row):
    if task.form == "joined":
        pairs = dict(divmod(token, task.values) for token in row[: task.pairs])
        return {place: pairs[row[place] - task.keys * task.values] for place in range(task.pairs, len(row))}
    pairs = {row[place]: row[place + 1] for place in range(0, 2 * task.pairs, 2)}
    return {place: pairs[row[place]] for place in range(2 * task.pairs, len(row)) if row[place] in pairs}


def needle(task, row):
    return {len(row) - 1: said(task, nearest(task, row[:-1], row[-1]))}


def focus(task, row):
    items = row[: -task.questions]
    places = range(len(items), len(row))
    return {place: said(task, nearest(task, items, row[place])) for place in places}


def deletion(task, row):
    if task.form == "sum":
        plus, minus = divmod(row[-1] - task.places * task.items, task.places)
        lists = [set() for _ in range(task.places)]
        for token in row[:-1]:
            lists[token // task.items].add(token % task.items)
        (left,) = lists[plus] - lists[minus]
        return {len(row) - 1: left}
    memory, answers, pairs = {}, {}, task.places * task.items
    for place, token in enumerate(row):
        if token < pairs:
            memory[token // task.items] = token % task.items
        elif token < pairs + task.places:
            memory.pop(token - pairs, None)
        else:
            answers[place] = memory.get(token - pairs - task.places, task.items)
    return answers


def opposition(task, row):
    asked = row[-1]
    for item in row[:-1]:
        agreement = cosine(item[: task.dim], asked[: task.dim])
        if abs(agreement) > 0.5:
            return {len(row) - 1: said(task, item) + (task.labels if agreement < 0 else 0)}
    return {len(row) - 1: 2 * task.labels}


def trigger(task, row):
    answers, before = {}, []
    for place, token in enumerate(row):
        if token[task.dim] > 0:  # the start
            continue
        is_trigger = token[task.dim + 1] > 0
        answers[place] = [
            sum(content[d] for content in before) / len(before) if is_trigger else 0.0
            for d in range(task.dim)
        ]
        if not is_trigger:
            before.append(token)
    return answers


def copy(task, row):
    mark = row.index(task.vocabulary)
    return {mark + place: token for place, token in enumerate(row[:mark])}


def induction(task, row):
    after = {row[place]: row[place + 1] for place in range(task.length - 1)}
    return {place: after[row[place]] for place in range(task.length, len(row))}


def in_context_recall(task, row):
    known, answers = {}, {}
    for place in range(0, len(row), 2):
        key, value = row[place : place + 2]
        if key >= task.keys:
            continue
        if key in known:
            answers[place] = known[key]
        known[key] = value
    return answers


def fuzzy_recall(task, row):
    text = "".join(chr(ord("A") + token) for token in row).lstrip(chr(ord("A") + task.keys + task.values))
    known, answers, place = {}, {}, len(row) - len(text)
    runs, kind = [], None
    for letter in text:
        now = ord(letter) - ord("A") < task.keys
        if now != kind:
            runs.append("")
            kind = now
        runs[-1] += letter
    for key, value in zip(runs[0::2], runs[1::2], strict=True):
        place += len(key)
        if key in known:
            answers |= {place - 1 + step: ord(letter) - ord("A") for step, letter in enumerate(known[key])}
            assert known[key] == value
        known[key] = value
        place += len(value)
    return answers


def selective_copy(task, row):
    tokens = [token for token in row if token < task.vocabulary]
    return {len(row) - len(tokens) + place: token for place, token in enumerate(tokens)}


def compression(task, row):
    return {len(row) - 1: row[:-1]}


SOLVERS = {
    "census": census,
    "compression": compression,
    "copy": copy,
    "deletion": deletion,
    "focus": focus,
    "fuzzy-recall": fuzzy_recall,
    "in-context-recall": in_context_recall,
    "induction": induction,
    "needle": needle,
    "noisy-recall": in_context_recall,
    "opposition": opposition,
    "recall": recall,
    "selective-copy": selective_copy,
    "trigger": trigger,
}
