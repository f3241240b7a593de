from __future__ import annotations

import subprocess
import sys

import pytest

import jaxlookahead


def test_every_public_name_exists_and_is_documented():
    assert jaxlookahead.__all__ == sorted(jaxlookahead._MODULES)
    for name in jaxlookahead.__all__:
        assert getattr(jaxlookahead, name).__doc__, name
    assert set(jaxlookahead.__all__) <= set(dir(jaxlookahead))


def test_import_brings_in_nothing_heavy():
    heavy = "{'flax', 'transformers', 'tokenizers', 'safetensors', 'gguf', 'rich', 'matplotlib', 'torch', 'optax'}"
    code = f"import sys, jaxlookahead, jaxlookahead.decoding, jaxlookahead.testing; print({heavy} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_comes_without_jax(option):
    code = (
        "import sys\nfrom jaxlookahead.cli.main import main\n"
        f"try:\n    main([{option!r}])\nfinally:\n    print('\\njax', 'jax' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "jaxlookahead" in out.stdout and out.stdout.endswith("jax False\n")
