"""TransformerLens computes softmax itself, so it must reject swapped models, with unsoft imported or not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unsoft
from tests.conftest import HANG
from tests.lab.interpret.steering.conftest import word_tokenizer

pytest.importorskip("transformer_lens", reason="needs pip install transformer-lens")

OPEN = """
import sys, torch, warnings
{first}
warnings.simplefilter("ignore")
from transformer_lens.model_bridge import TransformerBridge
bridge = TransformerBridge.boot_transformers(sys.argv[1], device="cpu")
bridge(torch.arange(3, 9)[None])
"""


def opened(folder: Path, first: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that opens the folder in a bridge and runs it."""
    environment = os.environ | {"PYTHONPATH": str(Path(unsoft.__file__).parents[1])}
    line = [sys.executable, "-c", OPEN.format(first=first), str(folder)]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=HANG)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("", "unsoft_llama"),
        ("import unsoft.hf", "PositionEmbeddingsAttentionBridge of transformer_lens"),
    ],
    ids=["without unsoft", "with unsoft"],
)
def test_the_bridge_refuses_a_swapped_folder(tiny, tmp_path, first, message):
    unsoft.hf.swap(tiny("llama"), "cog").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    done = opened(tmp_path, first)
    assert done.returncode != 0 and message in done.stderr


def test_the_bridge_opens_the_model_before_it_was_swapped(tiny, tmp_path):
    """So that the refusals above are not about something else."""
    torch.manual_seed(0)
    tiny("llama").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    done = opened(tmp_path, "import unsoft.hf")
    assert done.returncode == 0, done.stderr
