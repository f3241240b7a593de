from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import jaxlookahead


def test_every_public_name_exists_and_is_documented():
    assert jaxlookahead.__all__ == sorted(jaxlookahead._MODULES)
    for name in jaxlookahead.__all__:
        assert getattr(jaxlookahead, name).__doc__, name
    assert set(jaxlookahead.__all__) <= set(dir(jaxlookahead))


def test_help_says_something_on_every_public_method():
    silent = []
    for name in jaxlookahead.__all__:
        found = getattr(jaxlookahead, name)
        for member, value in vars(found).items() if inspect.isclass(found) else ():
            ours = getattr(value, "__module__", getattr(getattr(value, "fget", None), "__module__", ""))
            if not member.startswith("_") and str(ours).startswith("jaxlookahead") and not inspect.getdoc(value):
                silent.append(f"{name}.{member}")
    assert not silent


def test_the_whole_api_is_on_one_page():
    page = jaxlookahead.__doc__
    assert len(page.splitlines()) < 50
    for name in (*jaxlookahead.__all__, *jaxlookahead._SUBMODULES):
        assert re.search(rf"\b{name}s?\b", page) or name == "Rollout", name


def test_modules_are_imported_at_first_use():
    code = (
        "import sys, jaxlookahead as jl; "
        "print('jaxlookahead.show' in sys.modules, jl.show.__name__, jl.rollout.rollout)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("False jaxlookahead.show <function rollout")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxlookahead.nothing  # noqa: B018


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
