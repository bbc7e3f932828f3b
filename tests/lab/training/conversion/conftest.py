"""Fixtures of conversions."""

import pytest

from tests.lab.training.conversion.tiny import TEXT, save_model


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """The folder of a tiny language model."""
    return save_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of text that is easy to learn."""
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path
